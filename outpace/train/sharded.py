"""A draft sharded over the processes of a training (FSDP2): weights, gradients, states, checkpoints.

A process holds a share of every weight and of its optimizer states. Layers are gathered whole for their own
forward and backward, the rest for that of the step; gradients are added up and shared out. Checkpoints are
written by all processes at once while the training goes on, and are read by any number of them.
"""

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from outpace.checkpoint.save import write_atomically
from outpace.ops import ranks
from outpace.ops.shards import gathered
from outpace.train.checkpoint import OTHER, Log, log_text, not_finite, read_log
from outpace.train.trainer import StepLoss

D = TypeVar("D", bound=nn.Module)
RUN = "run.json"


class ShardedDraft(nn.Module, Generic[D]):
    """The root of what is sharded: losses call methods of a draft, and only a forward gathers weights."""

    def __init__(self, draft: D, device: torch.device) -> None:
        super().__init__()
        self.blank = (copy.deepcopy(draft).to("meta"),)  # in a tuple: no part of this module
        self.draft = draft
        mesh = init_device_mesh(device.type, (ranks.size(),))
        # products cast their own weights: norms, and RoPE's tables among the inputs, stay in float32
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        layers = draft.layers
        assert isinstance(layers, nn.ModuleList)
        for module in (*layers, self):
            fully_shard(module, mesh=mesh, mp_policy=policy)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)  # sums: a loss is divided by the weight of all rows
            module.set_force_sum_reduction_for_comms(True)

    def forward(self, loss: Callable[[], StepLoss]) -> tuple[StepLoss, list[Tensor]]:
        """The sums of its terms once more, for FSDP to find them."""
        result = loss()
        return result, [term.sum for term in result.terms]

    @torch.no_grad()
    def whole(self) -> D:
        """A draft with the weights as they are now, in every process."""
        weights = {name: gathered(value) for name, value in self.draft.state_dict().items()}
        draft = copy.deepcopy(self.blank[0])
        draft.load_state_dict(weights, assign=True)
        return draft


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns of a process alone, which was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


class ShardedCheckpoint:
    """folder/checkpoint/step-N: the shards of all processes (torch.distributed.checkpoint) and, when they are
    all written, run.json with the recipe and the log. The one before it goes then."""

    def __init__(
        self,
        folder: Path,
        draft: nn.Module,
        optimizers: dict[str, torch.optim.Optimizer],
        more: dict[str, Any],
    ) -> None:
        """`more`: states that every process has whole."""
        self.folder, self.draft, self.optimizers, self.more = folder / "checkpoint", draft, optimizers, more
        self.group = dist.new_group(backend="gloo") if ranks.size() > 1 else None  # for the writing alone
        self.pending: Any = None  # a future, while states are written
        self.path, self.contents = self.folder, ""

    def states(self) -> dict[str, Any]:
        states: dict[str, Any] = {"draft": self.draft.state_dict()}
        for name, optimizer in self.optimizers.items():
            states[name] = get_optimizer_state_dict(self.draft, optimizer)["state"]
        return states | {name: part.state_dict() for name, part in self.more.items()}

    def save(self, states: dict[str, Any], recipe: dict[str, Any], log: Log) -> None:
        """Returns when the states are copied; they are written while training goes on."""
        self.close()
        self.path = self.folder / f"step-{len(log)}"
        if ranks.leads():
            shutil.rmtree(self.path, ignore_errors=True)  # of a process that was killed
        ranks.wait()
        self.contents = json.dumps({"step": len(log), "recipe": recipe, "log": log_text(log)})
        if self.group is None:
            with _quiet():
                state_dict_saver.save(states, checkpoint_id=self.path, no_dist=True)
            self._publish()
        else:
            self.pending = state_dict_saver.async_save(
                states, checkpoint_id=self.path, process_group=self.group
            )

    def poll(self) -> None:
        if self.pending is not None and self.pending.done():
            self.close()

    def close(self) -> None:
        """Wait for what is being written."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None
            self._publish()

    def _publish(self) -> None:
        if not ranks.leads():
            return
        write_atomically(self.path / RUN, self.contents.encode())
        for other in self.folder.iterdir():
            if other != self.path:
                shutil.rmtree(other)

    def resume(self, steps: int) -> tuple[dict[str, Any], Log] | None:
        complete = [path.parent for path in self.folder.glob(f"step-*/{RUN}")]
        if not complete:
            return None
        path = max(complete, key=lambda folder: int(folder.name.removeprefix("step-")))
        damaged = f"{path} is not a whole training checkpoint ({{}}): delete it to begin this run again"
        try:
            run = json.loads((path / RUN).read_text(encoding="utf-8"))
            recipe, step = dict(run["recipe"]), int(run["step"])
            log = read_log(run["log"], step)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(damaged.format(repr(error)[:200])) from error
        if step > steps:
            why = f"it is at step {step}, and this recipe has {steps} steps"
            raise ValueError(OTHER.format(path=path, why=why))
        states = self.states()
        try:
            with _quiet():
                state_dict_loader.load(states, checkpoint_id=path, no_dist=self.group is None)
        except (Exception, CheckpointException) as error:  # the second is no Exception
            # of the first process where it failed; damage raises nearly anything
            cause = (
                next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            )
            if isinstance(cause, ValueError) or "Missing key" in str(cause):
                why = "its weights or optimizers have other shapes"
                raise ValueError(OTHER.format(path=path, why=why)) from error
            raise ValueError(damaged.format(type(cause).__name__)) from error
        for name, optimizer in self.optimizers.items():
            groups = get_optimizer_state_dict(self.draft, optimizer)[
                "param_groups"
            ]  # the recipe's as it is now
            given = {"state": states[name], "param_groups": groups}
            set_optimizer_state_dict(self.draft, optimizer, given)
        for name, part in self.more.items():
            part.load_state_dict(states[name])
        for name in not_finite(states):
            raise ValueError(f"{path}: {name} is not finite: delete it to begin this run again")
        return recipe, log
