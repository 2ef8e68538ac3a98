"""An epoch of `bump.training` against the plain loop of a tutorial, alternating in one run.

The plain loop: torchvision's data set and transforms, a DataLoader, float32, channels first. Both train the same
ResNet-18 from the same initialisation with the same optimiser, schedule and number of steps, on one thread. Prints a
line an epoch, then the medians, their ratio, and both test accuracies; `--out` keeps them as CSV.

    BUMP_DATA=... python benchmarks/training_speed.py --epochs 10
"""
import argparse
import time

import pandas as pd
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import CIFAR10

from bump.encoders import CIFAR_MEAN, CIFAR_STD
from bump.files import find_file
from bump.images import load_cifar10
from bump.training import Condition, accuracy, arithmetic, prepare_data, start_run, train_epoch


def plain_loader(batch_size: int, workers: int) -> DataLoader:
    """CIFAR-10 as tutorials load it: one image at a time through PIL."""
    steps = [transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
             transforms.Normalize(CIFAR_MEAN, CIFAR_STD)]
    data = CIFAR10(find_file("cifar-10-batches-py").parent, train=True, transform=transforms.Compose(steps))
    return DataLoader(data, batch_size, shuffle=True, drop_last=True, num_workers=workers)


def plain_epoch(model: nn.Module, optimiser, schedule, loader: DataLoader):
    """The loop of a tutorial."""
    model.train()
    for images, labels in loader:
        optimiser.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimiser.step()
        schedule.step()


def timed(work) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="of the plain loop's DataLoader")
    parser.add_argument("--out", help="CSV with a row an epoch and loop")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    condition = Condition("benchmark", width=options.width, epochs=options.epochs, seed=options.seed)
    data, loader = prepare_data(condition, *load_cifar10(train=True)), plain_loader(condition.batch_size, options.workers)
    ours, plain = start_run(condition), start_run(condition)
    plain[0].to(memory_format=torch.contiguous_format)
    rows = []
    for epoch in range(options.epochs):
        for loop, work in (("plain", lambda: plain_epoch(*plain, loader)),
                           ("bump", lambda: train_epoch(condition, *ours, data, epoch, keep=lambda step: None))):
            rows.append({"epoch": epoch + 1, "loop": loop, "seconds": timed(work)})
            print("{epoch:3d} {loop:5s} {seconds:.1f} s".format(**rows[-1]), flush=True)
    table, (pixels, labels) = pd.DataFrame(rows), load_cifar10(train=False)
    seconds = table.groupby("loop").seconds.median()
    right = {loop: 100 * accuracy(run[0], pixels / 255, labels) for loop, run in (("plain", plain), ("bump", ours))}
    print(f"median epoch: plain {seconds.plain:.1f} s, bump {seconds.bump:.1f} s, {seconds.plain / seconds.bump:.2f} times faster\n"
          f"test accuracy: plain {right['plain']:.2f} %, bump {right['bump']:.2f} %\n{arithmetic()}")
    if options.out:
        table.assign(test_accuracy=table["loop"].map(right), **arithmetic()).to_csv(options.out, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
