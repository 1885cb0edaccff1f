# SPDX-License-Identifier: Apache-2.0
"""Five models in plain PyTorch (1.13 or newer), from their papers, with random weights; nothing is downloaded.

``BUILD[name]()`` returns a module; ``inputs`` and ``targets`` return its data. Images have the shape (batch, 3, height,
width). Most models give 1000 classes for an image, DeepLab gives 21 classes for each pixel. The LSTM reads (batch,
steps, features) and gives 2 classes.
"""

from __future__ import annotations

from typing import Sequence

import torch
from table import Row
from torch import nn
from torch.nn import functional

CLASSES, PIXEL_CLASSES, TEXT_CLASSES = 1000, 21, 2
FEATURES, HIDDEN = 300, 512


class PreActivation(nn.Module):
    """Block of "Identity Mappings in Deep Residual Networks": norm and activation before each convolution."""

    def __init__(self, inside: int, width: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        outside = 4 * width
        self.first = nn.BatchNorm2d(inside)
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=dilation, dilation=dilation, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outside, 1, bias=False),
        )
        changes = stride != 1 or inside != outside
        self.shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ready = functional.relu(self.first(x))
        return self.body(ready) + self.shortcut(ready if isinstance(self.shortcut, nn.Conv2d) else x)


def resnet_trunk(blocks: Sequence[int], last_stride: int = 2) -> nn.Sequential:
    """Returns stem and four stages. With ``last_stride`` 1 the last stage is dilated instead, for output stride 16."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.MaxPool2d(3, 2, padding=1)]
    inside = 64
    for stage, count in enumerate(blocks):
        width, stride = 64 << stage, 1 if stage == 0 else (last_stride if stage == 3 else 2)
        dilation = 2 if stage == 3 and last_stride == 1 else 1
        for number in range(count):
            layers.append(PreActivation(inside, width, stride if number == 0 else 1, dilation))
            inside = 4 * width
    return nn.Sequential(*layers, nn.BatchNorm2d(inside), nn.ReLU(inplace=True))


def resnet_v2(blocks: Sequence[int]) -> nn.Module:
    return nn.Sequential(resnet_trunk(blocks), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, CLASSES))


def vgg_16() -> nn.Module:
    """Returns configuration D of "Very Deep Convolutional Networks"."""
    layers: list[nn.Module] = []
    inside = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _number in range(count):
            layers += [nn.Conv2d(inside, width, 3, padding=1), nn.ReLU(inplace=True)]
            inside = width
        layers.append(nn.MaxPool2d(2))
    dense = [nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096)]
    dense += [nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, CLASSES)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *dense)


class DeepLab(nn.Module):
    """DeepLab v3 on a dilated ResNet-V2-50: pyramid of rates 6, 12, 18 and the image's mean, at output stride 16."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = resnet_trunk((3, 4, 6, 3), last_stride=1)
        self.arms = nn.ModuleList([self.arm(1, 0, 1), *(self.arm(3, rate, rate) for rate in (6, 12, 18))])
        # No norm here, because the mean of a single image has no variance to normalize.
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(2048, 256, 1), nn.ReLU(inplace=True))
        self.head = nn.Sequential(
            nn.Conv2d(5 * 256, 256, 1, bias=False),
            nn.BatchNorm2d(256),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, PIXEL_CLASSES, 1),
        )

    @staticmethod
    def arm(kernel: int, padding: int, dilation: int) -> nn.Module:
        convolution = nn.Conv2d(2048, 256, kernel, padding=padding, dilation=dilation, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(256), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.trunk(x)
        mean = self.mean(seen).expand(-1, -1, *seen.shape[-2:])
        found = self.head(torch.cat([*(arm(seen) for arm in self.arms), mean], dim=1))
        return functional.interpolate(found, size=x.shape[-2:], mode="bilinear", align_corners=False)


class Lstm(nn.Module):
    """One layer over all steps; the last state decides. The width is this project's own choice."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(FEATURES, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, TEXT_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


BUILD = {
    "resnet_v2_50": lambda: resnet_v2((3, 4, 6, 3)),
    "resnet_v2_152": lambda: resnet_v2((3, 8, 36, 3)),
    "vgg_16": vgg_16,
    "deeplab": DeepLab,
    "lstm": Lstm,
}


def inputs(row: Row, device: torch.device) -> torch.Tensor:
    shape = (row.batch, *row.size) if row.model == "lstm" else (row.batch, 3, *row.size)
    return torch.randn(shape, device=device)


def targets(row: Row, device: torch.device) -> torch.Tensor:
    """Returns random target classes in the shape that cross entropy takes."""
    if row.model == "deeplab":
        return torch.randint(PIXEL_CLASSES, (row.batch, *row.size), device=device)
    return torch.randint(TEXT_CLASSES if row.model == "lstm" else CLASSES, (row.batch,), device=device)
