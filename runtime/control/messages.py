"""Every message between the processes of a run, and their encoding. Metadata only: a tensor travels as an `ObjectRef`.

A frame is MessagePack of [PROTOCOL, sequence, [class name, fields…]]. A *peer* is a connection that sent Hello:
"generator/0:1" is rank 1 of a replica, "agent:b" the agent of host b.

- A rank: Hello, Setup, Ready, then Orders and Results until Goodbye.
- An agent: Hello, AgentReady, then a Launch for each of its ranks and an Exited for each that ends, until Goodbye;
  Leaving, if its host is taken away. An End asks it to kill a rank. GivenUp ends an agent that counts as dead. Waits
  tells another process of its name to wait, and Introduce to begin.
- Between hosts an agent forwards the messages of its ranks, several at once as RankMessages. A message to several of
  its ranks comes once, as a Delivery. SignsOfLife reports the state of the ranks (see `relay`).
- Ranks that form a process group use the controller's key-value store by Post, Count and Look; BoardValues is the
  answer.
- A rank asks a rank of another host for part of a block in one frame, MessagePack of [EXCHANGE, number, Ask]. The
  answer repeats the number: [EXCHANGE, number, ""] with the bytes in a second frame, or only [EXCHANGE, number, why
  not]. Asking changes nothing, so a question may be asked twice.

Events and commands are written to the event log in the same encoding, without a frame.
"""

import signal as signals
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, field

from penstock.graph.ir import Firing
from penstock.graph.types import MOST_ITEMS
from penstock.runtime.packable import Packable
from penstock.runtime.schedule.events import Abort, Answer, Command, Copied, Event, Send
from penstock.runtime.tensor.shm import ObjectRef

# Written twice, since a type cannot be made of a value; a type checker compares them.
ProtocolVersion = Literal[12]
PROTOCOL: ProtocolVersion = 12
# Most characters of a text for the user; of a longer one the middle is left out.
MAX_TEXT = 16 << 10
# Most bytes of one packed value, in either direction: metadata only. The largest is the manifest of a mixture of
# experts: 6.5 MB for the 36,945 tensors of 94 layers with 128 experts in fp8.
MAX_BYTES = 16 << 20
# Most bytes of the envelope of a Delivery: its number, and the names of the ranks that it is for.
AROUND = 32 << 10
# A time on some machine's clock. A peer's infinity or NaN would spoil the run's metrics.
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
# The number of items over which a metric is a mean.
Weight = Annotated[float, Meta(gt=0, le=MOST_ITEMS)]


# To the controller ----------------------------------------------------------------------------------------


class Hello(Packable, frozen=True):
    """The first message of every connection. `name` is a rank's replica, also on its heartbeat's connection, or an
    agent's host. `again`: this process has sent it before, on a connection that has broken.
    """

    role: Literal["rank", "agent", "heartbeat"]
    name: str
    rank: int
    pid: int
    host: str
    token: str
    again: bool = False

    def __repr__(self) -> str:
        """All but the token."""
        return f"Hello({self.role!r}, {self.name!r}, {self.rank}, pid={self.pid}, host={self.host!r})"

    @property
    def peer(self) -> str:
        """The peer's name: a rank's and its heartbeat's are the same."""
        return agent_peer(self.name) if self.role == "agent" else rank_peer(self.name, self.rank)


class Ready(Packable, frozen=True):
    """A rank is set up; `restored` are the values that it restored from a checkpoint."""

    replica: str
    rank: int
    pid: int
    restored: tuple[tuple[Firing, str, ObjectRef], ...] = ()


class Manifest(Packable, frozen=True):
    """What the receivers of a version of weights need: the digests of its tensors, by name. `layout` is the JSON of
    `WeightPublisher.description`, the same for all versions of the channel; "" for a reader that has it already.
    """

    channel: str
    version: int
    digests: dict[str, int]
    layout: str = ""


class Result(Packable, frozen=True):
    """A rank's answer to a command, or that of several ranks (the event's `others`). `outputs` are for other ranks;
    `began` and `ended` are seconds of `time.monotonic` on the rank's host. `sample` is the output of
    `record.samples.sample` for the values that it made. `manifest` comes with `Published`, from the first rank of the
    replica: all its ranks have the same. `unread` comes with `Failed` if a value could not be read: the replica that
    made it, and its life. `counts` are those of the `metrics` that are a `Mean`.
    """

    event: Answer | Copied | Abort
    outputs: dict[str, ObjectRef] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    began: Seconds = 0.0
    ended: Seconds = 0.0
    manifest: Manifest | None = None
    sample: str = ""
    unread: tuple[str, int] | None = None
    counts: dict[str, Weight] = field(default_factory=dict)


class SendFailed(Packable, frozen=True):
    """This rank could not send weights to a replica. `life` is how often the replica had been lost before."""

    replica: str
    life: int
    error: str


class Untrusted(Packable, frozen=True):
    """What this rank computes can no longer be trusted: it answers nothing more, and the run stops at once."""

    error: str


class Results(Packable, frozen=True):
    """Answers that are sent together."""

    results: tuple[Result, ...]


class Heartbeat(Packable, frozen=True):
    """The process is alive; `doing` is what its main thread is working on."""

    doing: str = ""


class SignsOfLife(Packable, frozen=True):
    """News of an agent's ranks, by peer name: what they are working on, and which give no sign of life. `dropped`
    counts by kind the frames that the agent has dropped since its last report; `last` describes one of them.
    """

    doing: dict[str, str]
    silent: tuple[str, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)
    last: str = ""


class Note(Packable, frozen=True):
    """A line for the user and the run's log. `unreadable`: the checkpoint to resume from cannot be read."""

    level: Literal["warning", "error"]
    text: str
    unreadable: bool = False


class AgentReady(Packable, frozen=True):
    """The agent of `host` can start ranks. `life`: how many agents had this host before."""

    host: str
    pid: int
    life: int = 0


class Leaving(Packable, frozen=True):
    """`host` is taken away in `grace` seconds; its ranks live on until then, or until a goodbye."""

    host: str
    grace: Seconds


class Exited(Packable, frozen=True):
    """A rank's process ended: with an exit `status`, or by a `signal` (0: none). `tail` is the end of its stderr.
    `forks`: the process that forks ranks has ended, and the rank with it; pid, status and signal are that process's."""

    replica: str
    rank: int
    pid: int
    status: int
    signal: int
    tail: str
    forks: bool = False

    @property
    def reason(self) -> str:
        """One line, and the tail of stderr below it."""
        ended = f"killed by {signal_name(self.signal)}" if self.signal else f"exit status {self.status}"
        whose = "with the process that forks the ranks of its host: " if self.forks else ""
        return f"{whose}{ended} (pid {self.pid})" + (f"\n{self.tail}" if self.tail else "")


class Post(Packable, frozen=True):
    """Store `value`, in hexadecimal, under `key` on the board."""

    key: str
    value: str


class Count(Packable, frozen=True):
    """Add `amount` to a number on the board, 0 if it is new. The answer to question `number` is the sum."""

    number: int
    key: str
    amount: int


class Look(Packable, frozen=True):
    """Ask for the values of `keys` on the board. Answered when all are there; `at_once`: with those that are there."""

    number: int
    keys: tuple[str, ...]
    at_once: bool = False


# To ranks -------------------------------------------------------------------------------------------------


class Setup(Packable, frozen=True):
    """What a rank needs to be set up. `config` is the run's configuration as JSON text. `restore` has the names that
    the checkpoint to resume from may have in the run folder of its host, the likelier one last; () for a start from the
    beginning, and for a replica that was lost.
    """

    config: str
    restore: tuple[str, ...]


class Order(Packable, frozen=True):
    """Commands, in order, and where the values are that they need: (firing, output, handle). A `Save` among the
    commands writes into the folder `checkpoint` in the run folder's `checkpoints`; `kept` are the names under which the
    checkpoints that stay were written. `manifests` are those of the versions that the replica receives. `lives`: how
    often the replicas that are sent weights have been lost. `together`: by channel, sets of replicas that are sent a
    version at once; each replica is in at most one. These are here once, and not in each `Send`: a trainer sends to as
    many replicas as there are generators.
    """

    commands: tuple[Command, ...]
    handles: tuple[tuple[Firing, str, ObjectRef], ...] = ()
    checkpoint: str = ""
    kept: tuple[str, ...] = ()
    manifests: tuple[Manifest, ...] = ()
    lives: dict[str, int] = field(default_factory=dict)
    together: dict[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)

    def whole(self, send: Send) -> Send:
        """A command of this order as the scheduler gave it."""
        together = (names for names in self.together.get(send.channel, ()) if send.replica in names)
        return msgspec.structs.replace(send, together=next(together, ()))


class BoardValues(Packable, frozen=True):
    """The answer to question `number`: values of the board, in hexadecimal. `error` says why there is none. Number 0
    stands for a Post, which is answered only if it is refused. `suspended_s` is the seconds for which the controller
    itself was suspended so far.
    """

    number: int
    values: dict[str, str]
    error: str = ""
    suspended_s: float = 0.0


class Goodbye(Packable, frozen=True):
    """End: nothing more will come. To ranks and agents; an agent ends its ranks first. `lost`: the run has failed by
    the loss of a process, which a restart from its last checkpoint may mend."""

    reason: str
    lost: bool = False


# To agents ------------------------------------------------------------------------------------------------


class GivenUp(Packable, frozen=True):
    """The run goes on without this process: it gave no sign of life for too long, or its messages were lost."""

    reason: str


class Waits(Packable, frozen=True):
    """Another process of this agent's name is there, with this `pid`: this one waits until it is gone."""

    pid: int


class Introduce(Packable, frozen=True):
    """Say Hello again: the process is gone that had this name."""


class Launch(Packable, frozen=True):
    """Start a rank with this many CPU threads, in the interpreter `python`, if given. `life`: how often its replica has
    been lost before. `start`: how often it has been started before, whether or not it got ready."""

    replica: str
    rank: int
    threads: int = 1
    python: str = ""
    life: int = 0
    start: int = 0


class End(Packable, frozen=True):
    """Kill a rank, whose replica is lost."""

    replica: str
    rank: int


class Delivery(Packable, frozen=True):
    """Hand the packed `message` to several ranks; `aside`: on the connections of their heartbeats."""

    peers: tuple[str, ...]
    message: bytes
    aside: bool = False


Question = Post | Count | Look
OfRank = Hello | Ready | Results | SendFailed | Untrusted | Note | Question


class RankMessages(Packable, frozen=True):
    """Messages of ranks to their agent, in order. The tokens of their Hellos are left out."""

    said: tuple[tuple[str, OfRank], ...]


ToController = (
    Hello
    | Ready
    | Result
    | Results
    | SendFailed
    | Untrusted
    | Heartbeat
    | SignsOfLife
    | Note
    | AgentReady
    | Leaving
    | Exited
    | Question
    | RankMessages
)
Message = ToController | Setup | Order | BoardValues | Goodbye | GivenUp | Waits | Introduce | Launch | End | Delivery

# The exit status of a rank that has sent a `Note` with the reason of its end.
EXIT_EXPLAINED = 3


def rank_peer(replica: str, rank: int) -> str:
    return f"{replica}:{rank}"


def agent_peer(host: str) -> str:
    return f"agent:{host}"


def shortened(text: str, most: int = MAX_TEXT) -> str:
    """A text of about `most` characters at most. It keeps more of the end than of the beginning: a traceback ends with
    what was raised.
    """
    if len(text) <= most:
        return text
    return f"{text[: most // 4]}\n… {len(text) - most} characters left out …\n{text[len(text) - 3 * most // 4 :]}"


def signal_name(number: int) -> str:
    """The name of a signal, as SIGKILL for 9; its number if Python has no name for it."""
    return signals.Signals(number).name if number in signals.Signals.__members__.values() else f"signal {number}"


# The version of the messages between ranks of different hosts.
EXCHANGE: Literal[1] = 1
# Most bytes of a block in one answer.
CHUNK = 1 << 20
# Most unanswered questions to one owner: enough for one chunk to travel while others are copied.
WINDOW = 8
# Most bytes of a question: an object reference and two numbers.
MAX_QUESTION = 4096


class Ask(Packable, frozen=True):
    """Ask for `length` bytes of the block of `handle`, from byte `start` on."""

    handle: ObjectRef
    start: int
    length: int


# Encoding -------------------------------------------------------------------------------------------------

T = TypeVar("T")


class MessageError(ValueError):
    """Bytes that are no message: a peer's fault. The text says which field was given what, and what was needed."""


class TooLargeError(MessageError):
    """A value that is too large for its readers: `value`, and the name of its largest field, `field`."""

    def __init__(self, value: Any, size: int, most: int) -> None:
        self.value = value
        sizes = {name: len(repr(content)) for name, content in msgspec.structs.asdict(value).items()}
        self.field = max(sizes, key=sizes.__getitem__)
        what = getattr(value, self.field)
        parts = f", {len(what)} of them" if isinstance(what, tuple | dict) else ""
        given = f"{type(value).__name__} of {size} bytes, most of which are its {self.field}{parts}"
        super().__init__(f"given {given}; needed at most {most}")


class Codec(Generic[T]):
    """Packs and unpacks values of one annotation, such as a union of Packables. `label` names it in errors.

    A Packable is an array of its class's name and its fields in order. Only the classes that the annotation names are
    constructed: no extension types, no names looked up. A packed value has at most `most` bytes.
    """

    def __init__(self, annotation: Any, label: str, most: int = MAX_BYTES) -> None:
        self._label, self._most = label, most
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(annotation).decode

    def pack(self, value: T) -> bytes:
        """The value as bytes. Raises TooLargeError for more than readers take, TypeError for a value that is no
        message."""
        try:
            data: bytes = self._encode(value)
        # A file name may contain such text, which must not keep an error from being reported.
        except UnicodeEncodeError:
            data = self._encode(_escaped(msgspec.to_builtins(value)))
        if len(data) > self._most:
            raise TooLargeError(value[-1] if isinstance(value, tuple) else value, len(data), self._most)
        return data

    def unpack(self, data: bytes) -> T:
        """The value that `data` encodes. Raises MessageError for anything that `pack` could not have made."""
        try:
            if len(data) > self._most:
                raise msgspec.DecodeError(f"given {len(data)} bytes, needed at most {self._most}")
            value: T = self._decode(data)
            packed = self._encode(value)
            # msgspec fills in missing fields that have defaults. Another encoding of a number is allowed.
            if packed != data and _omits(msgspec.msgpack.decode(data), msgspec.msgpack.decode(packed)):
                raise msgspec.ValidationError("a field is left out")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            # Without a bound, megabytes of a peer's data would get into the log.
            raise MessageError(f"{self._label}: {error!s:.160}") from error
        return value


def _omits(given: Any, whole: Any) -> bool:
    """True if an array lacks items that its counterpart in `whole` has."""
    if isinstance(whole, dict):
        return any(_omits(given[key], value) for key, value in whole.items())
    return isinstance(whole, list) and (len(given) != len(whole) or any(map(_omits, given, whole)))


def _escaped(plain: Any) -> Any:
    """The value with backslash escapes in text that UTF-8 cannot encode, as in some file names."""
    match plain:
        case str():
            return plain.encode(errors="backslashreplace").decode()
        case list() | tuple():
            return [_escaped(one) for one in plain]
        case dict():
            return {_escaped(key): _escaped(one) for key, one in plain.items()}
    return plain


_FRAMED = tuple[ProtocolVersion, int, Message]
_FRAME: Codec[tuple[int, int, Message]] = Codec(_FRAMED, "frame")
_CARRIED: Codec[tuple[int, int, Message]] = Codec(_FRAMED, "frame", MAX_BYTES + AROUND)
_RECORD: Codec[Event | Command] = Codec(Event | Command, "record")
QUESTION: Codec[tuple[int, int, Ask]] = Codec(tuple[Literal[1], int, Ask], "question")
ANSWER: Codec[tuple[int, int, str]] = Codec(tuple[Literal[1], int, str], "answer")

# Bytes of a frame's head with sequence number 0: the array header and two small numbers.
_HEAD = 3
_HEADER = msgspec.msgpack.Encoder().encode

# An event or command as bytes.
record_bytes = _RECORD.pack
# The event or command that bytes encode. Raises MessageError for anything else.
read_record = _RECORD.unpack


def pack(message: Message, sequence: int = 0) -> bytes:
    """One frame. Raises TooLargeError beyond MAX_BYTES; for a Delivery, beyond MAX_BYTES + AROUND."""
    return (_CARRIED if isinstance(message, Delivery) else _FRAME).pack((PROTOCOL, sequence, message))


def pack_message(message: Message) -> bytes:
    """A message without its frame: packed once, for several receivers. Raises TooLargeError as `pack`."""
    return _FRAME.pack((PROTOCOL, 0, message))[_HEAD:]


def framed(packed: bytes, sequence: int) -> bytes:
    """The frame of a packed message."""
    return _HEADER((PROTOCOL, sequence, msgspec.Raw(packed)))


def unpack(data: bytes) -> tuple[int, Message]:
    """A frame's sequence number and message. Raises MessageError for anything else."""
    return _CARRIED.unpack(data)[1:]
