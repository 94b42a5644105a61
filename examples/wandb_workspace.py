"""A workspace of W&B for runs of `brainet`: five sections in the order in which one asks, and no other panels.

    pip install wandb-workspaces
    python examples/wandb_workspace.py                    # prints the panels
    python examples/wandb_workspace.py ENTITY PROJECT     # online: saves them there, and prints the address

Keys are those of docs/reference/metrics.md; a test compares them.
"""

import sys

SECTIONS = {  # heading → title of a panel → keys
    "Is it good?": {
        "NLL, validation": ["val/cls/NLL"],
        "accuracy, training and validation": ["train/cls/Acc", "val/cls/Acc"],
        "NLL, test": ["test/cls/NLL", "test/scaled/cls/NLL"],
        "accuracy, test": ["test/cls/Acc"],
    },
    "Can it be believed?": {
        "calibration error, validation": ["val/cal/ECE"],
        "calibration error, test, before and after": ["test/cal/ECE", "test/scaled/cal/ECE"],
        "errors among the surest 80 %": ["test/sc/Risk@80Cov"],
    },
    "Does it notice what it never saw?": {
        "share of a class left out that is noticed": ["verdict/noticed", "verdict/noticed_low", "verdict/noticed_high"],
        "known test inputs called unknown": ["verdict/test/Unknown"],
    },
    "Was the head worth it?": {"NLL beside a linear layer": ["versus/head/NLL", "versus/linear/NLL"]},
    "How did the fit go?": {
        "loss": ["train/loss"],
        "learning rate": ["train/lr"],
        "sub-networks that count": ["structure/perplexity", "val/head/perplexity"],
        "time of a prediction, ms a batch": ["cost/head/ms"],
    },
}
CURVES = ("train/", "val/")  # what has a value for every epoch; all other keys have one for each run


def workspace(entity: str, project: str):
    """The sections as W&B's package builds them: curves for what a fit changes, bars for one number a run."""
    import wandb_workspaces.reports.v2 as parts
    import wandb_workspaces.workspaces as spaces

    sections = []
    for heading, panels in SECTIONS.items():
        drawn = []
        for title, keys in panels.items():
            if keys[0].startswith(CURVES):
                drawn.append(parts.LinePlot(title=title, x="trainer/global_step", y=keys))
            else:
                drawn.append(parts.BarPlot(title=title, metrics=keys))
        sections.append(spaces.Section(name=heading, panels=drawn, is_open=True))
    settings = spaces.WorkspaceSettings(remove_legends_from_panels=False, sort_panels_alphabetically=False)
    return spaces.Workspace(
        entity=entity, project=project, name="brainet", sections=sections, settings=settings,
        auto_generate_panels=False,
    )  # fmt: skip


if __name__ == "__main__":
    for heading, panels in SECTIONS.items():
        print(f"{heading} {'; '.join(panels)}")
    if len(sys.argv) == 3:
        print(workspace(*sys.argv[1:]).save().url)
