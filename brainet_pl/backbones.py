"""Feature extractors: CIFAR networks as plain modules with loaders for public weight layouts."""

from __future__ import annotations

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


class CifarResNet(nn.Module):
    """ResNet-20/32/44/56 for 32×32 images (He et al. 2016, section 4.2): depth = 6n + 2; 64 features."""

    def __init__(self, depth: int = 20, num_classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"expected a depth of 6n + 2 (20, 32, 44, 56), got {depth}")
        n = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, n, 1)
        self.layer2 = self._stage(16, 32, n, 2)
        self.layer3 = self._stage(32, 64, n, 2)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    @staticmethod
    def _stage(in_planes: int, planes: int, blocks: int, stride: int) -> nn.Sequential:
        first = _BasicBlock(in_planes, planes, stride)
        return nn.Sequential(first, *(_BasicBlock(planes, planes, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 32, 32) → (B, num_classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        features = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return torch.as_tensor(self.linear(features))
