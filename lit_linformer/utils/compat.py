"""All private names of dependencies that this project uses: what for, and what would replace them.

None of them is guaranteed to stay. tests/utils/test_compat.py looks up each of them in the installed versions, and finds
uses elsewhere, so that if a new release drops one, that test fails and names it, and not a run.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["EmptyStateDictLoadPlanner", "TorchDispatchMode", "load_state_dict"]

# torch. To see each tensor that is made (the length sweep's memory), TorchDispatchMode is the only hook, which torch's notes on
# extending it describe under this name (pytorch/pytorch#110073).
# To read a sharded checkpoint without knowing what it holds, torch has dcp_to_torch_save, which unpickles what it reads and
# writes a file. These two are its building blocks; pytorch/pytorch#125528 asks for a function that returns what it reads.
EmptyStateDictLoadPlanner = _EmptyStateDictLoadPlanner
load_state_dict = _load_state_dict

# Overridden, not called: Lightning calls these methods of its classes. Without the first three this project would need
# copies of LightningCLI and Trainer.
OVERRIDDEN = {
    "lightning.pytorch.Trainer._run": "each process begins and ends here: signals, closing the curves, errors in one line",
    "lightning.pytorch.Trainer._run_stage": "the end of fit, while loggers and processes are still there",
    "lightning.pytorch.cli.LightningCLI._add_subcommands": "a parser for the command that is asked for, not for all five",
    "lightning.pytorch.cli.LightningCLI._prepare_subcommand_parser": "the same",
    "lightning.pytorch.cli.LightningCLI._parse_ckpt_path": (
        "a checkpoint's hyper-parameters would win over the command line (Lightning-AI/pytorch-lightning#21455)"
    ),
    "lightning.pytorch.cli.LightningCLI._run_subcommand": (
        "prepare, which needs no Trainer (how to make one's own commands is open: Lightning-AI/pytorch-lightning#12438)"
    ),
    "lightning.pytorch.callbacks.ModelCheckpoint._monitor_candidates": "one number for all processes, before they compare it",
    "transformers.PreTrainedModel._init_weights": "transformers asks each model for its start there; documented, if private",
}
# Set or called on objects: the function below that does so.
USED = {
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor": "no_broadcast_of_signals",
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._should_check_val_fx": "validation_follows",
    "lightning.pytorch.loops.fit_loop._FitLoop._load_combined_loader_states": "restore_loaders",
    "lightning.pytorch.trainer.connectors.logger_connector._LoggerConnector.update_train_step_metrics": "log_train_step_now",
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector.register_signal_handlers": "own_signal_handlers",
    "torch._dynamo.config.recompile_limit": "many_recompilations",
}
# The same for attributes that only instances have, with the class whose source names them.
SET_IN = {
    "torch.optim.AdamW": ("_step_supports_amp_scaling", "clip_before_fused_step"),
    "argparse.ArgumentParser": ("_actions", "actions"),
    "jsonargparse._typehints.ActionTypeHint": ("_typehint", "type_of"),
    "lightning.pytorch.loops.loop._Loop": ("_restarting", "begin_next_pass"),
    "lightning.pytorch.Trainer": ("_signal_connector", "own_signal_handlers"),
    "lightning.pytorch.loops.fit_loop._FitLoop": ("_data_fetcher", "validation_follows"),
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop": ("_batches_that_stepped", "count_step_before"),
    "lightning.pytorch.loops.evaluation_loop._EvaluationLoop": ("_has_run", "forget_validation"),
    "lightning.pytorch.strategies.DDPStrategy": ("_timeout", "timeout"),
    "lightning.pytorch.strategies.ModelParallelStrategy": ("_data_parallel_size", "shard_over_all"),
}


def no_broadcast_of_signals(trainer: Any) -> None:
    """Stops Lightning from asking before every batch whether process 0 has had a signal, for which a GPU waits.

    The callback Preemption asks once a step, while the GPU works. No setting turns Lightning's check off: its issue is
    Lightning-AI/pytorch-lightning#21487, and #21640 would add one.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def validation_follows(trainer: Any) -> bool:
    """Whether a validation follows the training batch that has just ended. Lightning does not expose this."""
    loop = trainer.fit_loop
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def count_step_before(trainer: Any) -> None:
    """Counts the step of the checkpoint that a run resumes from on the loggers' axis, before its first batch.

    Lightning does not count it if the checkpoint was written in a validation that is not due again, such as the last one of
    a run that was to end there: every later point would be a step too early.
    """
    loop = trainer.fit_loop.epoch_loop
    if len(trainer.optimizers) == 1 and loop._batches_that_stepped == trainer.global_step - 1:
        loop._batches_that_stepped += 1


def forget_validation(trainer: Any) -> None:
    """Makes the epoch loop forget a validation before the first step of a resumed run, and begin as it does without one.

    Otherwise, if the run resumes at a pass's end, the loop would count as done before it has begun, as would each later pass,
    without a step.
    """
    trainer.fit_loop.epoch_loop.val_loop._has_run = False


def begin_next_pass(trainer: Any) -> None:
    """Lets a run resumed at the end of a pass begin the next one. Lightning's property can't be false with max_steps."""
    trainer.fit_loop.epoch_loop.restarting = False
    trainer.fit_loop._restarting = False


def end_pass(trainer: Any) -> None:
    """Ends the pass after whose last batch a run resumes: Lightning would begin the next one, without the hooks of either."""
    loop = trainer.fit_loop
    loop.epoch_loop._batches_that_stepped += 1
    loop.on_advance_end()
    loop.reset_restart_stage()
    begin_next_pass(trainer)


def log_train_step_now(trainer: Any) -> None:
    """Sends a step's metrics to the loggers before the callbacks' on_train_batch_end, and so before the step's checkpoint."""
    trainer._logger_connector.update_train_step_metrics()


def timeout(strategy: Any) -> Any:
    """How long the processes wait for each other, as the user has set it; None: torch's default."""
    return getattr(strategy, "_timeout", None)


def shard_over_all(strategy: Any, processes: int) -> None:
    """Shards (FSDP2) over all processes. The strategy's own setting needs their number before it is known."""
    strategy._data_parallel_size, strategy._tensor_parallel_size = processes, 1


def restore_loaders(trainer: Any) -> None:
    """Restores loaders made before their state was read, by a configure_optimizers that asks for the number of steps."""
    trainer.fit_loop._load_combined_loader_states()


def own_signal_handlers(trainer: Any) -> None:
    """Leaves signals to utils/signals.py. Lightning would install its own handlers; no setting turns that off."""
    trainer._signal_connector.register_signal_handlers = lambda: None


def clip_before_fused_step(optimizer: torch.optim.Optimizer) -> None:
    """Lets Lightning clip gradients before a fused AdamW's step.

    A fused step can unscale gradients by itself; Lightning then refuses to clip, in bf16-mixed too, which scales nothing
    (Lightning-AI/pytorch-lightning#21435). If Lightning believes that the step can't, it passes unscaled, clipped gradients
    in every precision.
    """
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def many_recompilations() -> None:
    """torch.compile gives up on a function after 8 shapes; a benchmark has more models than that, sharing one code object.

    Newer torch also has it as torch.compiler.config.recompile_limit (pytorch/pytorch#164899).
    """
    torch._dynamo.config.recompile_limit = 64


def on_one_gpu(arguments: Any) -> None:
    """Stops transformers' Trainer from dividing batches among all visible GPUs, which no setting of TrainingArguments does."""
    arguments._n_gpu = min(1, arguments.n_gpu)


def actions(parser: Any) -> list[Any]:
    """A parser's arguments, with type, default and help.

    argparse has no public list of them; what python/cpython#125363 asks for would go through this one.
    """
    return parser._actions


def type_of(action: Any) -> Any:
    """The annotation of an argument, which jsonargparse keeps besides the type made from it; None for a plain one."""
    return getattr(action, "_typehint", None)
