"""Parts by their names."""

from brainet_pl._utils.parts import make_part, part_classes
from brainet_pl.tasks import Classification, Task


def test_a_class_that_stands_in_for_another_does_not_take_its_name():
    """While torch traces a model, it derives such classes from those of its modules."""
    stand_in = type("Classification", (Classification,), {"__init__": lambda self, base, path: None})
    stand_in.__module__, stand_in.__qualname__ = Classification.__module__, Classification.__qualname__
    assert part_classes(Task)["Classification"] is Classification
    made = make_part(Task, {"class_path": "Classification", "init_args": {"num_classes": 3}}, "task")
    assert type(made) is Classification
