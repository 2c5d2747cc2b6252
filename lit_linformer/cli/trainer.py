"""Lightning's Trainer as this project's commands use it."""

from functools import reduce
from operator import or_
from typing import Any, get_args

from lightning.pytorch import LightningDataModule, Trainer

from lit_linformer.callbacks import Curves, Resuming
from lit_linformer.callbacks.observing import callback_of
from lit_linformer.callbacks.owed import finish
from lit_linformer.callbacks.preemption import interrupted
from lit_linformer.cli.failures import failure
from lit_linformer.utils import compat


def whole_numbers_first(hints: dict[str, Any]) -> None:
    """Puts int before float in unions of the two, since jsonargparse takes the first that fits: 20 batches are not 20.0.

    Lightning has this order, but typing caches unions: if another package has written Optional[Union[float, int]] before,
    Lightning's Optional[Union[int, float]] becomes the same (seen with torch 2.11 on Python 3.12).
    """
    for name, hint in hints.items():
        kinds = [*get_args(hint)]
        if {int, float} <= {*kinds} and (last := kinds.index(int)) > (first := kinds.index(float)):
            kinds[first], kinds[last] = int, float
            hints[name] = reduce(or_, kinds)


whole_numbers_first(Trainer.__init__.__annotations__)


class RunTrainer(Trainer):
    """Lightning's Trainer with one more command, `prepare`, and with signals left to utils/signals.py."""

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        # Every process starts here, forked ones too.
        compat.own_signal_handlers(self)
        failed = True
        try:
            results = super()._run(*args, **kwargs)
            failed = False
            return results
        except KeyboardInterrupt as error:  # from the user's own code; a signal raises Stopped
            raise interrupted(self) from error
        except Exception as error:
            try:
                told = failure(error, self)
            except Exception as again:  # torch's handler raised again, for the next worker that has ended
                told = failure(again, self)
            if told is None:
                raise
            raise told from error
        finally:
            if (curves := callback_of(self, Curves)) is not None:
                curves.close(self, failed)

    @property
    def log_dir(self) -> str:
        """The run folder; Lightning's would depend on the logger."""
        return self.default_root_dir

    def _run_stage(self) -> Any:
        if self.state.fn != "fit":
            return super()._run_stage()
        callback_of(self, Resuming).restored(self)
        results = super()._run_stage()
        finish(self)
        return results

    def prepare(self, datamodule: LightningDataModule, ckpt_path: str | None = None, weights_only: bool | None = None) -> None:
        """Makes the tokenizer and the token blocks; trains nothing. A config's checkpoint settings are ignored."""
        # Only its arguments and these words are read, for the parser: app.py prepares without a Trainer.
