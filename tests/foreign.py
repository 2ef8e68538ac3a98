"""CIFAR-10 networks of other authors, whose checkpoints the pilot tests measure.

Inputs are normalised images (N, 3, 32, 32). Each network is `features` followed by `head`, so that one checkpoint gives
both the accuracy and the features.
Sources: akamaster/pytorch_resnet_cifar10 (He et al. 2016, section 4.2) and eth-sri/mn-bab (`resnet_2b2_bn`)."""
from pathlib import Path

import torch
from torch import nn


class BasicBlock(nn.Module):
    "Two 3×3 convolutions and the option-A shortcut: every second pixel, missing channels zero on both sides."

    def __init__(self, n_in, n_out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out)
        self.conv2, self.bn2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out)
        self.stride, self.n_zeros = stride, (n_out - n_in) // 2

    def forward(self, x):
        shortcut = nn.functional.pad(x[:, :, ::self.stride, ::self.stride], (0, 0, 0, 0, self.n_zeros, self.n_zeros))
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(inner)) + shortcut)


class CifarResNet(nn.Module):
    "ResNet-20, -32, … of the original paper for CIFAR-10; features are the 64 globally averaged channels."

    def __init__(self, depth):
        super().__init__()
        n = (depth - 2) // 6
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        for i, (n_in, n_out) in enumerate([(16, 16), (16, 32), (32, 64)], 1):
            blocks = [BasicBlock(n_in if j == 0 else n_out, n_out, 2 if i > 1 and j == 0 else 1) for j in range(n)]
            setattr(self, f"layer{i}", nn.Sequential(*blocks))
        self.linear = nn.Linear(64, 10)

    def features(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(x))).mean((2, 3))

    def head(self, features):
        return self.linear(features)


class TwoPaths(nn.Module):
    "The sum of a 1×1 and of two 3×3 convolutions, both halving the image."

    def __init__(self, n_in, n_out):
        super().__init__()
        self.path_a = nn.Sequential(nn.Identity(), nn.Conv2d(n_in, n_out, 1, 2, bias=False), nn.BatchNorm2d(n_out))
        self.path_b = nn.Sequential(nn.Conv2d(n_in, n_out, 3, 2, 1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU(),
                                    nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x):
        return self.path_a(x) + self.path_b(x)


class ResNet2B2(nn.Sequential):
    "A small ResNet with batch norm: stem and two blocks, all of stride 2; features are 100 units after a ReLU."

    def __init__(self):
        super().__init__(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                         nn.Sequential(TwoPaths(16, 32), nn.ReLU()), nn.Sequential(TwoPaths(32, 64), nn.ReLU()),
                         nn.Flatten(), nn.Linear(1024, 100), nn.ReLU(), nn.Linear(100, 10))

    def features(self, x):
        for layer in list(self)[:-1]:
            x = layer(x)
        return x

    def head(self, features):
        return self[-1](features)


class Features(nn.Module):
    "A network without its head, as a module of its own."

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network.features(x)


def fill(network: nn.Module, path: Path) -> nn.Module:
    "The network with a checkpoint's weights, strictly, in evaluation mode; the file is read as data only."
    tensors = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    network.load_state_dict({name.removeprefix("module."): t for name, t in tensors.items()}, strict=True)
    return network.eval().requires_grad_(False)
