"""Modules whose buffers get their size from data, not from the arguments of their constructor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn


class DataSizedBuffers(nn.Module):
    """Buffers take the shape of what is loaded into them, and keep 32 bits where the rest of a model is made 16.

    Attributes:
        may_be_missing: whether a checkpoint may lack the module, which then stays as it is.
    """

    may_be_missing: ClassVar[bool] = False

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Build what the tensors of a checkpoint are about to be loaded into; `stored` names them as this module does.

        Nothing is stored where the checkpoint lacks the module.
        """

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        def wide(tensor: Tensor) -> Tensor:
            moved: Tensor = fn(tensor)
            return tensor.to(moved.device) if moved.is_floating_point() and moved.element_size() < 4 else moved

        return super()._apply(wide, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        stored = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        self.before_load(stored)
        for name, buffer in list(self._buffers.items()):
            # What was made in inference mode can't be written to outside of it.
            if buffer is not None and name in stored and (buffer.shape != stored[name].shape or buffer.is_inference()):
                self._buffers[name] = buffer.new_empty(stored[name].shape)
        if stored or not self.may_be_missing:
            super()._load_from_state_dict(state_dict, prefix, *args)
