"""What callbacks share, in a user's own Trainer."""

from lit_linformer.callbacks import Measuring
from tests.helpers import Descending, plain_trainer


class Steps(Measuring):
    def __init__(self):
        self.measured = []

    def after_validation(self, trainer, pl_module):
        self.measured.append(self.measured_step(trainer))


def test_the_step_that_is_measured_is_that_of_the_model(tmp_path):
    """With the model of a fit in the same process it was 0."""
    steps, module = Steps(), Descending()
    trainer = plain_trainer(tmp_path, steps, val_check_interval=2)
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "fourth.ckpt")
    trainer.validate(module, verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    trainer.validate(module, ckpt_path=tmp_path / "fourth.ckpt", verbose=False)
    trainer.validate(module, verbose=False)
    assert steps.measured == [2, 4, 4, 6, 8, 4, 8]
