"""A classification of a user's own goes through a checkpoint."""

import torch

from brainet_pl._utils.parts import make_part
from brainet_pl.tasks import Classification, Task


class Tempered(Classification):
    """Probabilities of logits divided by a temperature."""

    def __init__(self, num_classes, temperature=2.0, loss="cross_entropy"):
        super().__init__(num_classes, loss)
        self.temperature = temperature

    def probabilities(self, outputs):
        return super().probabilities(outputs / self.temperature)


def test_a_subclass_with_an_argument_of_its_own_is_rebuilt_from_its_dictionary():
    task = Tempered(3, temperature=4.0, loss="confidence")
    data = task.to_dict()
    assert data["init_args"] == {"num_classes": 3, "temperature": 4.0, "loss": "confidence"}
    again = make_part(Task, data, "task")
    assert type(again) is Tempered
    assert again.settings() == task.settings()
    assert again.out_features == 4
    outputs = torch.randn(2, 5, 4)
    torch.testing.assert_close(again.predictive(outputs, None), task.predictive(outputs, None))


def test_every_setting_of_a_classification_survives():
    task = Classification(5, "confidence", 0.1, 0.4)
    assert make_part(Task, task.to_dict(), "task").settings() == {
        "num_classes": 5,
        "loss": "confidence",
        "label_smoothing": 0.1,
        "confidence_budget": 0.4,
    }
