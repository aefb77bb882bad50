"""A vision transformer, or a ResNet with batch norm over the whole batch, on images that are drawn.

torchrun --nproc-per-node 4 examples/images.py vit
torchrun --nproc-per-node 4 examples/images.py resnet
"""

from __future__ import annotations

import argparse

import torch
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

import autopar

CLASSES, SIZE = 10, 32


def model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "vit":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        return ViTForImageClassification(ViTConfig(**sizes, image_size=SIZE, patch_size=8, num_labels=CLASSES))
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=CLASSES))


def batch(step: int, rows: int) -> dict[str, torch.Tensor]:
    """Images whose mean color says their class."""
    draws = torch.Generator().manual_seed(step)
    labels = torch.randint(0, CLASSES, (rows,), generator=draws)
    images = torch.randn(rows, 3, SIZE, SIZE, generator=draws) + (labels.view(-1, 1, 1, 1) - CLASSES / 2) / 2
    return {"pixel_values": images, "labels": labels}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", choices=("vit", "resnet"), default="vit")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=32)
    asked = parser.parse_args()
    net = autopar.autoparallelize(model(asked.name).train(), batch(0, asked.rows))
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    for step in range(asked.steps):
        loss = net(**batch(step, asked.rows)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    valid = batch(10_000, asked.rows)
    with torch.no_grad():
        logits = net(**valid).logits
    whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    print(f"loss {loss.item():.3f}, right {(whole.argmax(-1) == valid['labels']).float().mean().item():.2f}")
