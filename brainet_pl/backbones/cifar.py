"""Networks for 32×32 images (CIFAR), which load public weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _BasicBlock(nn.Module):
    """Two 3×3 convolutions with a parameter-free shortcut (option A of He et al. 2016)."""

    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.pad = (planes - in_planes) // 2
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return F.relu(out + F.pad(shortcut, (0, 0, 0, 0, self.pad, self.pad)))


class _PreActBlock(nn.Module):
    """Norm and ReLU before each convolution (He et al. 2016b): a bottleneck, or the two 3×3 of a wide ResNet."""

    def __init__(self, in_planes: int, planes: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        out = planes * 4 if bottleneck else planes
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        strides = (1, stride, 1) if bottleneck else (stride, 1)
        sizes = (in_planes, planes, planes, out) if bottleneck else (in_planes, planes, planes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in sizes[:-1])
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, k, s, k // 2, bias=False)
            for a, b, k, s in zip(sizes, sizes[1:], kernels, strides, strict=False)
        )
        same = in_planes == out and stride == 1
        self.shortcut = None if same else nn.Conv2d(in_planes, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        for i, (norm, conv) in enumerate(zip(self.norms, self.convs, strict=True)):
            x = F.relu(norm(x))
            if i == 0 and self.shortcut is not None:
                shortcut = self.shortcut(x)
            x = conv(x)
        return x + shortcut


class CifarResNet(nn.Module):
    """ResNet-20/32/44/56 for 32×32 images (He et al. 2016, section 4.2): depth = 6n + 2; 64 features."""

    def __init__(self, depth: int = 20, num_classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"expected a depth of 6n + 2 (20, 32, 44, 56), got {depth}")
        n = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        for i, (a, b) in enumerate(((16, 16), (16, 32), (32, 64)), start=1):
            blocks = [_BasicBlock(a if j == 0 else b, b, 2 if j == 0 and i > 1 else 1) for j in range(n)]
            self.add_module(f"layer{i}", nn.Sequential(*blocks))
        self.linear = nn.Linear(64, num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images (B, 3, 32, 32) to logits (B, num_classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        for i in (1, 2, 3):
            x = self.get_submodule(f"layer{i}")(x)
        return torch.as_tensor(self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1)))


class CifarPreActNet(nn.Module):
    """PreResNet (bottlenecks, depth = 9n + 2) and wide ResNet (depth = 6n + 4, `widen` times the planes)."""

    def __init__(self, depth: int = 164, widen: int = 1, num_classes: int = 10) -> None:
        super().__init__()
        bottleneck = widen == 1
        step, extra = (9, 2) if bottleneck else (6, 4)
        if (depth - extra) % step:
            raise ValueError(f"expected a depth of {step}n + {extra}, got {depth}")
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        blocks: list[nn.Module] = []
        planes = 16
        for stage in range(3):
            out = 16 * 2**stage * widen
            for j in range((depth - extra) // step):
                blocks.append(_PreActBlock(planes, out, 2 if stage and j == 0 else 1, bottleneck))
                planes = out * 4 if bottleneck else out
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(planes)
        self.fc = nn.Linear(planes, num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images (B, 3, 32, 32) to logits (B, num_classes)."""
        x = F.relu(self.norm(self.blocks(self.conv1(x))))
        return torch.as_tensor(self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1)))


class CifarVGG(nn.Module):
    """VGG-13 or VGG-16 with batch norm for 32×32 images: 512 features and one dense layer."""

    STAGES: Mapping[int, tuple[int, ...]] = {13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3)}

    def __init__(self, depth: int = 13, num_classes: int = 10) -> None:
        super().__init__()
        if depth not in self.STAGES:
            raise ValueError(f"expected a depth of 13 or 16, got {depth}")
        layers: list[nn.Module] = []
        planes = 3
        for convolutions, out in zip(self.STAGES[depth], (64, 128, 256, 512, 512), strict=True):
            for _ in range(convolutions):
                layers += [nn.Conv2d(planes, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
                planes = out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(512, num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images (B, 3, 32, 32) to logits (B, num_classes)."""
        return torch.as_tensor(self.classifier(self.features(x).flatten(1)))


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


CIFAR: dict[str, Callable[..., nn.Module]] = {
    **{f"cifar_resnet{depth}": partial(CifarResNet, depth) for depth in (20, 32, 44, 56)},
    "cifar_vgg13": partial(CifarVGG, 13),
    "cifar_vgg16": partial(CifarVGG, 16),
    "cifar_preresnet164": partial(CifarPreActNet, 164),
    "cifar_wrn28_10": partial(CifarPreActNet, 28, widen=10),
}
