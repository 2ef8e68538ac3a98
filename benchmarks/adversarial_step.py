"""A training step against an adversary, and its bare forward and backward passes, alternating in one run.

What must be paid for: for each step of the attack, a forward pass and the derivative by the images; then a forward pass
and the derivative by the weights. What is measured beside it: all that `bump.training.train_step` does, from the
augmentation to the optimiser, and `bump.training.attack` alone. The same ResNet-18, batches and precision, on one
thread. Prints medians over the steps and their ratios; `--out` keeps the times as CSV.

    BUMP_DATA=... python benchmarks/adversarial_step.py --steps 60
"""
import argparse
from timeit import timeit

import pandas as pd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bump.images import load_cifar10
from bump.training import Condition, arithmetic, attack, logits, prepare_data, start_run, train_step


def attack_passes(condition: Condition, model: nn.Module, images: torch.Tensor, labels: torch.Tensor):
    """The passes of an attack, at images that stay where they are."""
    model.eval()
    for _ in range(condition.attack_steps):
        x = images.detach().requires_grad_(True)
        torch.autograd.grad(cross_entropy(logits(model, x, condition.precision), labels), x)
    model.train()


def learning_passes(condition: Condition, model: nn.Module, images: torch.Tensor, labels: torch.Tensor):
    """The passes of a step without an adversary."""
    model.zero_grad(set_to_none=True)
    cross_entropy(logits(model, images.contiguous(memory_format=torch.channels_last), condition.precision), labels).backward()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--out", help="CSV with a row a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    condition = Condition("benchmark", width=options.width, epsilon=options.epsilon)
    model, optimiser, _ = start_run(condition)
    images, labels = prepare_data(condition, *load_cifar10(train=True))
    draw, rows = torch.Generator().manual_seed(0), []
    for step in range(options.steps + 3):  # the first three warm up
        batch = torch.randperm(len(labels), generator=draw)[:condition.batch_size]
        x, y = images[batch].contiguous(), labels[batch]
        work = {"attack_passes": lambda x=x, y=y: attack_passes(condition, model, x, y),
                "attack": lambda x=x, y=y: attack(model, x, y, condition.epsilon, condition.attack_steps, condition.precision),
                "learning_passes": lambda x=x, y=y: learning_passes(condition, model, x, y),
                "step": lambda x=x, y=y: train_step(condition, model, optimiser, x, y, draw)}
        rows.append({name: timeit(call, number=1) for name, call in work.items()})
    table = pd.DataFrame(rows[3:])
    table["passes"] = table.attack_passes + table.learning_passes
    ms = 1000 * table.median()
    print(f"milliseconds for a batch of {condition.batch_size}, median of {options.steps}:\n{ms.round(1).to_string()}\n"
          f"attack / its passes: {ms.attack / ms.attack_passes:.3f}; whole step / all passes: {ms.step / ms.passes:.3f}\n{arithmetic()}")
    if options.out:
        table.assign(**arithmetic()).to_csv(options.out, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
