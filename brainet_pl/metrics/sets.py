"""Names of the sets of a test: the known one, unknown ones, and those that resemble the training data."""

from __future__ import annotations

from collections.abc import Iterable

TEST = "test"  # the known test set


def check_set_names(names: Iterable[str], near: Iterable[str] = ()) -> None:
    """Refuse names of out-of-distribution sets that would overwrite the results of another set, and unknown near ones.

    Results are kept by the name of their set, in files too, where a "/" becomes a "_".
    """
    files: dict[str, str] = {}
    for name in names:
        if name == TEST:
            raise ValueError(
                f"expected names of out-of-distribution sets other than {TEST!r}, which is the known test set, got "
                f"{name!r}: rename that set"
            )
        file = name.replace("/", "_")
        if file in files:
            raise ValueError(
                f"expected out-of-distribution sets whose files have different names, got {files[file]!r} and "
                f"{name!r}, both written as {file!r}: rename one of them"
            )
        files[file] = name
    unknown = sorted(set(near) - set(files.values()))
    if unknown:
        raise ValueError(
            f"expected near to name out-of-distribution sets ({', '.join(files.values()) or 'there are none'}), got "
            f"{', '.join(unknown)}: correct near, or add the set"
        )
