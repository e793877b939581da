"""Every message between the processes of a run, and their encoding. Metadata only: a tensor travels as an `ObjectRef`.

A frame is MessagePack of [PROTOCOL, sequence, [class name, fields…]]. A *peer* is a connection that said Hello:
"generator/0:1" is rank 1 of a replica, "agent:b" the agent of host b.

- A rank: Hello, Setup, Ready, then Orders and Results until Goodbye.
- An agent: Hello, AgentReady, then a Launch for each of its ranks and an Exited for each that ends, until Goodbye;
  Leaving, if its host is taken away. An End asks it to kill a rank.
- Between hosts an agent carries what its ranks say, several at once as RankMessages, and what is said to them, each
  thing once for all of its ranks that it is for, as a Delivery; SignsOfLife says how they are (see `relay`).
- Ranks that form a process group Post to the controller's key-value store, Count and Look there; BoardValues is the
  answer.
- A rank asks a rank of another host for part of a block in one frame, MessagePack of [EXCHANGE, number, Ask]. The
  answer repeats the number: [EXCHANGE, number, ""] with the bytes in a second frame, or [EXCHANGE, number, why not]
  alone. Asking changes nothing, so a question may be asked twice.

Events and commands are written to the event log in the same encoding, without a frame.
"""

import signal as signals
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, field

from penstock.graph.ir import Firing
from penstock.runtime.packable import Packable
from penstock.runtime.schedule.events import Abort, Answer, Command, Copied, Event, Send
from penstock.runtime.tensor.shm import ObjectRef

PROTOCOL: Literal[9] = 9
# Characters of a text for the user: the middle of a longer one is left out.
MAX_TEXT = 16 << 10
# Bytes of one packed value, in either direction: metadata only, so ten times what a large batch needs.
MAX_BYTES = 4 << 20
# Bytes that may be around a message besides: its number, and the names of those for whom an agent takes it.
AROUND = 32 << 10
# On a clock of some machine. A peer's infinity or NaN would spoil the run's figures.
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]


# To the controller ----------------------------------------------------------------------------------------


class Hello(Packable, frozen=True):
    """The first message of every connection. `name` is a replica, or an agent's host; a heartbeat's socket says
    whose it is: the replica's, or "agent:<host>". `again`: this process has said it before, on a connection that has
    broken.
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
    """A rank has made what it holds; `restored` are the values of a checkpoint that it took up."""

    replica: str
    rank: int
    pid: int
    restored: tuple[tuple[Firing, str, ObjectRef], ...] = ()


class Manifest(Packable, frozen=True):
    """What the receivers of a version of weights have to know: the digests of its tensors, by name. `layout` is JSON,
    what `WeightPublisher.description` says of all versions of the channel; "" for a reader that has been told before.
    """

    channel: str
    version: int
    digests: dict[str, int]
    layout: str = ""


class Result(Packable, frozen=True):
    """A rank's answer to a command, or that of several (the event's `others`). `outputs` are for other ranks; `began`
    and `ended` are seconds of `time.monotonic` on the rank's host. `sample` is what `record.samples.sample` says of the
    values that it has made. `manifest` comes with `Published`, from the first
    rank of the replica: all its ranks have made the same. `unread` comes with `Failed` where a value could not be read:
    the replica that made it, and its life.
    """

    event: Answer | Copied | Abort
    outputs: dict[str, ObjectRef] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    began: Seconds = 0.0
    ended: Seconds = 0.0
    manifest: Manifest | None = None
    sample: str = ""
    unread: tuple[str, int] | None = None


class SendFailed(Packable, frozen=True):
    """This rank could not send weights to a replica, in its `life`: so often it had been lost before."""

    replica: str
    life: int
    error: str


class Results(Packable, frozen=True):
    """The answers that were there at once."""

    results: tuple[Result, ...]


class Heartbeat(Packable, frozen=True):
    """The process lives; `doing` is what its main thread is at."""

    doing: str = ""


class SignsOfLife(Packable, frozen=True):
    """What is new of the ranks of an agent, by their names as peers: what they are at, and which give no sign of life.
    `dropped` counts by kind the frames that the agent has dropped since the last one; `last` describes one of them.
    """

    doing: dict[str, str]
    silent: tuple[str, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)
    last: str = ""


class Note(Packable, frozen=True):
    """A line for the user and the run's log. `unreadable`: an error of the checkpoint that the run goes on from."""

    level: Literal["warning", "error"]
    text: str
    unreadable: bool = False


class AgentReady(Packable, frozen=True):
    """The agent of `host` can start ranks. `life`: how many others have been given its place before."""

    host: str
    pid: int
    life: int = 0


class Leaving(Packable, frozen=True):
    """`host` is taken away in `grace` seconds; its ranks live on until then, or until a goodbye."""

    host: str
    grace: Seconds


class Exited(Packable, frozen=True):
    """A rank's process ended: with an exit `status`, or by a `signal` (0: none). `tail` is the end of its stderr.
    `forks`: these are of the process that forks ranks, with which the rank has ended."""

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
    """Put `value`, in hexadecimal, up on the board under `key`."""

    key: str
    value: str


class Count(Packable, frozen=True):
    """Add to a number on the board, 0 if it is not there; the answer to question `number` is the sum."""

    number: int
    key: str
    amount: int


class Look(Packable, frozen=True):
    """What is on the board under `keys`? Answered when all are there or, with `at_once`, with those that are."""

    number: int
    keys: tuple[str, ...]
    at_once: bool = False


# To ranks -------------------------------------------------------------------------------------------------


class Setup(Packable, frozen=True):
    """All that a rank needs to know before it makes what it holds: the run's configuration as JSON text, and the
    names that the checkpoint which it goes on from may have in the run folder of its host, the likelier one last; none
    for a start from the beginning, and for a replica that was lost.
    """

    config: str
    restore: tuple[str, ...]


class Order(Packable, frozen=True):
    """What to do, in order, and where the values are that it needs: (firing, output, handle). `checkpoint` names the
    folder, in the run folder's `checkpoints`, into which a `Save` among the commands writes, and `kept` those of the
    checkpoints that stay, by the names under which they were written. `manifests` are those of
    the versions that the replica receives. `lives`: how often replicas that are sent weights have been lost.
    `together`: by channel, the replicas that are sent a version at once: each is in one of them at most. It stands here
    once, and not in each `Send`: a trainer sends to as many as there are generators.
    """

    commands: tuple[Command, ...]
    handles: tuple[tuple[Firing, str, ObjectRef], ...] = ()
    checkpoint: str = ""
    kept: tuple[str, ...] = ()
    manifests: tuple[Manifest, ...] = ()
    lives: dict[str, int] = field(default_factory=dict)
    together: dict[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)

    def whole(self, send: Send) -> Send:
        """A command of this order as the scheduler has said it."""
        together = (names for names in self.together.get(send.channel, ()) if send.replica in names)
        return msgspec.structs.replace(send, together=next(together, ()))


class BoardValues(Packable, frozen=True):
    """The answer to question `number`: values of the board, in hexadecimal. `error` says why there is none; number 0
    stands for a Post, which has no answer unless it is refused. `held_up` are the seconds that the controller itself
    was stopped so far.
    """

    number: int
    values: dict[str, str]
    error: str = ""
    held_up: float = 0.0


class Goodbye(Packable, frozen=True):
    """Nothing more will come: end. To ranks and agents; an agent ends its ranks first. `lost`: the run has failed by
    the loss of a process, which a start from its last checkpoint may mend."""

    reason: str
    lost: bool = False


# To agents ------------------------------------------------------------------------------------------------


class Launch(Packable, frozen=True):
    """Start a rank with this many CPU threads, in an interpreter of its own if `python` names one. `life`: how often
    its replica has been lost before; `start`: how often it has been started, be it ready or not."""

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
    """Hand `message`, packed, to several ranks; `aside`: on the connections of their heartbeats."""

    peers: tuple[str, ...]
    message: bytes
    aside: bool = False


Question = Post | Count | Look
OfRank = Hello | Ready | Results | SendFailed | Note | Question


class RankMessages(Packable, frozen=True):
    """What ranks have said to their agent, in order. The tokens of their Hellos are left out."""

    said: tuple[tuple[str, OfRank], ...]


ToController = (
    Hello
    | Ready
    | Result
    | Results
    | SendFailed
    | Heartbeat
    | SignsOfLife
    | Note
    | AgentReady
    | Leaving
    | Exited
    | Question
    | RankMessages
)
Message = ToController | Setup | Order | BoardValues | Goodbye | Launch | End | Delivery

# The exit status of a rank that has said in a `Note` why it ends.
EXIT_EXPLAINED = 3


def rank_peer(replica: str, rank: int) -> str:
    return f"{replica}:{rank}"


def agent_peer(host: str) -> str:
    return f"agent:{host}"


def shortened(text: str, most: int = MAX_TEXT) -> str:
    """A text of at most about `most` characters, with more of its end than of its beginning: tracebacks end with what
    was raised.
    """
    if len(text) <= most:
        return text
    return f"{text[: most // 4]}\n… {len(text) - most} characters left out …\n{text[len(text) - 3 * most // 4 :]}"


def signal_name(number: int) -> str:
    """9 is SIGKILL; the number for one that Python has no name for."""
    return signals.Signals(number).name if number in signals.Signals.__members__.values() else f"signal {number}"


# The version of the messages between ranks of different hosts.
EXCHANGE: Literal[1] = 1
# Bytes of a block that one answer holds at most.
CHUNK = 1 << 20
# Questions that may be under way to one owner: enough for a chunk to be on its way while others are copied.
WINDOW = 8
# Bytes of a question: a handle and two numbers.
MAX_QUESTION = 4096


class Ask(Packable, frozen=True):
    """`length` bytes of the block of `handle`, beginning with byte `start` of it."""

    handle: ObjectRef
    start: int
    length: int


# Encoding -------------------------------------------------------------------------------------------------

T = TypeVar("T")


class MessageError(ValueError):
    """Bytes that are no message: a peer's fault. Says which field was given what, and what was needed."""


class TooLargeError(MessageError):
    """A value that no reader takes: `value`, and the name of the largest of its fields."""

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

    A Packable is an array of its class's name and its fields in order. Nothing is constructed but the classes that the
    annotation names: no extension types, no names looked up. `most` are the bytes of a packed value.
    """

    def __init__(self, annotation: Any, label: str, most: int = MAX_BYTES) -> None:
        self._label, self._most = label, most
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(annotation).decode

    def pack(self, value: T) -> bytes:
        """Raises TooLargeError when the value is larger than any reader takes, TypeError when it is no message."""
        try:
            data: bytes = self._encode(value)
        # A file's name may be such text, which must not keep an error from being told.
        except UnicodeEncodeError:
            data = self._encode(_escaped(msgspec.to_builtins(value)))
        if len(data) > self._most:
            raise TooLargeError(value[-1] if isinstance(value, tuple) else value, len(data), self._most)
        return data

    def unpack(self, data: bytes) -> T:
        """Raises MessageError for anything but what `pack` could have made."""
        try:
            if len(data) > self._most:
                raise msgspec.DecodeError(f"given {len(data)} bytes, needed at most {self._most}")
            value: T = self._decode(data)
            packed = self._encode(value)
            # msgspec fills in fields that have defaults. Another spelling of a number is no fault.
            if packed != data and _omits(msgspec.msgpack.decode(data), msgspec.msgpack.decode(packed)):
                raise msgspec.ValidationError("a field is left out")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            # Without a bound, an error would carry megabytes of what a peer sent into the log.
            raise MessageError(f"{self._label}: {error!s:.160}") from error
        return value


def _omits(given: Any, whole: Any) -> bool:
    """Does an array lack items that `whole` has in its place?"""
    if isinstance(whole, dict):
        return any(_omits(given[key], value) for key, value in whole.items())
    return isinstance(whole, list) and (len(given) != len(whole) or any(map(_omits, given, whole)))


def _escaped(plain: Any) -> Any:
    """Text that UTF-8 cannot hold (a file's name may be such) with backslashes."""
    match plain:
        case str():
            return plain.encode(errors="backslashreplace").decode()
        case list() | tuple():
            return [_escaped(one) for one in plain]
        case dict():
            return {_escaped(key): _escaped(one) for key, one in plain.items()}
    return plain


_FRAMED = tuple[Literal[9], int, Message]
_FRAME: Codec[tuple[int, int, Message]] = Codec(_FRAMED, "frame")
_CARRIED: Codec[tuple[int, int, Message]] = Codec(_FRAMED, "frame", MAX_BYTES + AROUND)
_RECORD: Codec[Event | Command] = Codec(Event | Command, "record")
QUESTION: Codec[tuple[int, int, Ask]] = Codec(tuple[Literal[1], int, Ask], "question")
ANSWER: Codec[tuple[int, int, str]] = Codec(tuple[Literal[1], int, str], "answer")

# Bytes of a frame's head with sequence number 0: an array of three, and two small numbers.
_HEAD = 3
_HEADER = msgspec.msgpack.Encoder().encode

# An event or command as bytes.
record_bytes = _RECORD.pack
# An event or command of bytes. Raises MessageError for what no version of this program wrote.
read_record = _RECORD.unpack


def pack(message: Message, sequence: int = 0) -> bytes:
    """One frame. Raises TooLargeError when it is larger than MAX_BYTES, less what is around what is delivered."""
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
