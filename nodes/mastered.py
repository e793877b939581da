"""Weights that change during a run, and the model that computes with them.

Master weights are float32. Where the run's dtype is another, the model that computes holds a copy in that dtype,
the same numbers that are broadcast, so that trainer and generator work with equal weights. Over several ranks each has
its parts of the masters, and what computes is converted as it is gathered.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.graph.types import Context
from penstock.nodes.model import torch_dtype
from penstock.nodes.model.hf import check_names, check_shape
from penstock.nodes.parallel.ranks import Ranks
from penstock.nodes.sequence_model import Model, SequenceModel
from penstock.nodes.tokenizer import Tokenizer

MASTER = "master"
"""What the names of master weights begin with in a state."""


class Mastered(SequenceModel[Model]):
    """A model with float32 masters. `version` counts the updates that changed them."""

    called: ClassVar[str] = "model"
    """What error messages call it."""

    def __init__(self, master: Model, tokenizer: Tokenizer, context: Context) -> None:
        parted, dtype = Ranks.of(context).count > 1, torch_dtype(context.dtype)
        copied = not parted and dtype != torch.float32
        super().__init__(deepcopy(master).to(dtype) if copied else master, tokenizer, context)
        self.masters = dict(master.named_parameters()) if copied else self.workers.parameters
        self.version = 0

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        return {f"{MASTER}.{name}": p.detach() for name, p in self.masters.items()}, {"version": self.version}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Raises ModelError for the state of another model."""
        where = f"state of the {self.called}"
        needed = {f"{kind}.{name}": p for kind in self._kinds(facts) for name, p in self.masters.items()}
        # From another mesh, what other stages hold comes as tensors without elements.
        check_names(needed, {name: t for name, t in tensors.items() if t.numel() or name in needed}, where)
        for name, parameter in needed.items():
            if parameter.numel() or tensors[name].numel():  # no rows of a width are no rows of another
                check_shape(name, tensors[name].shape, parameter, where)
        for name, parameter in self.masters.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"{MASTER}.{name}"].view(parameter.shape))
        self.copy_masters()
        self.version = facts["version"]

    def offloadable(self) -> Mapping[str, Tensor]:
        """The masters, where they are not what computes."""
        if self.masters is self.workers.parameters:
            return {}
        return {f"{MASTER}.{name}": parameter for name, parameter in self.masters.items()}

    def copy_masters(self) -> None:
        """The model computes with the masters as they are now."""
        self.workers.update(self.masters)

    def _kinds(self, facts: Mapping[str, Any]) -> tuple[str, ...]:
        """What a state with these facts has of each parameter: a tensor of its shape."""
        return (MASTER,)
