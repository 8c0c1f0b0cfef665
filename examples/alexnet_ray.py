"""AlexNet on CIFAR-10: alone, over the nodes of a Ray cluster, or as a worker of a swarm.

    python examples/alexnet_ray.py --quick

trains on this machine in a minute. On two pods, as a Ray job:

    diloco provision --pods 2 --deploy-only
    diloco launch --engine ray examples/alexnet.toml 2 --program examples/alexnet_ray.py

Plainly, the ranks average their gradients in every step. Where `Diloco(model)` finds a daemon, each peer trains by
itself, and the weights are averaged every --hv.local-steps steps, by
`diloco peer --worker "python examples/alexnet_ray.py"`. Without a network it trains on made pictures.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import os
import tarfile
import tomllib
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel

from diloco import Diloco

CIFAR = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
NUM_CLASSES = 10
QUICK = {"passes": 5, "size": 64, "width": 0.25, "made": 5000, "lr": 1e-3}


@dataclass(frozen=True)
class Pictures:
    """Pictures [n, 3, 32, 32] as bytes, and their classes [n]."""

    pictures: Tensor
    classes: Tensor

    def __len__(self) -> int:
        return len(self.classes)

    def part(self, start: int, stop: int) -> Pictures:
        return Pictures(self.pictures[start:stop], self.classes[start:stop])


class AlexNet(nn.Module):
    """Five convolutions and three linear layers; `width` scales their channels, `size` the pictures."""

    def __init__(self, *, size: int, width: float) -> None:
        super().__init__()
        self.size = size
        c1, c2, c3, c4, hidden = (max(8, int(width * channels)) for channels in (64, 192, 384, 256, 4096))
        self.features = nn.Sequential(
            *(nn.Conv2d(3, c1, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(c1, c2, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(c2, c3, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(c3, c4, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(c4, c4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        )
        num_features = self.features(torch.zeros(1, 3, size, size)).numel()
        self.classifier = nn.Sequential(
            *(nn.Dropout(), nn.Linear(num_features, hidden), nn.ReLU()),
            *(nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU()),
            nn.Linear(hidden, NUM_CLASSES),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        # Its first layer was made for photographs, and leaves nothing of 32 x 32 pixels.
        scaled = interpolate(pictures.float() / 64 - 2, size=self.size, mode="bilinear")
        return self.classifier(self.features(scaled).flatten(1))


def made_pictures(number: int, seed: int) -> Pictures:
    """Ten patches of colours, one for each class, seen shifted, mirrored, brighter or darker, and under noise."""
    patches = torch.randn(NUM_CLASSES, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    patches = interpolate(patches, size=32, mode="bicubic")
    random = torch.Generator().manual_seed(seed)
    classes = torch.randint(NUM_CLASSES, (number,), generator=random)
    rows, columns = (torch.arange(32) + torch.randint(-4, 5, (number, 1), generator=random) for _ in "yx")
    mirrored = torch.rand(number, 1, generator=random) < 0.5
    columns = torch.where(mirrored, 31 - columns, columns)
    rows, columns = rows[:, None, :, None] % 32, columns[:, None, None] % 32
    seen = patches[classes[:, None, None, None], torch.arange(3)[None, :, None, None], rows, columns]
    seen *= torch.rand(number, 1, 1, 1, generator=random) + 0.5
    seen += torch.randn(seen.shape, generator=random) / 2
    return Pictures((128 + 40 * seen).clamp(0, 255).byte(), classes)


def load(directory: Path, num_made: int) -> tuple[Pictures, Pictures, Pictures]:
    """To train, to validate, to test: CIFAR-10 if it is here or can be fetched, else made pictures."""
    try:
        batches = read(fetched(directory))
    except (OSError, http.client.HTTPException) as error:
        print(f"CIFAR-10 cannot be had ({error}): training on made pictures", flush=True)
        return made_pictures(num_made, 1), made_pictures(num_made // 6, 2), made_pictures(num_made // 6, 3)
    return batches.part(0, 45_000), batches.part(45_000, 50_000), batches.part(50_000, 60_000)


def fetched(directory: Path) -> Path:
    """The archive of CIFAR-10, fetched once. Raises OSError."""
    archive = directory / "cifar-10-binary.tar.gz"
    if not archive.exists():
        with urllib.request.urlopen(CIFAR, timeout=30) as answer:
            content = answer.read()
        if hashlib.md5(content).hexdigest() != CIFAR_MD5:
            raise OSError(f"{CIFAR} is not what it was")
        directory.mkdir(parents=True, exist_ok=True)
        partial = archive.with_suffix(f".{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(archive)
    return archive


def read(archive: Path) -> Pictures:
    """Five batches to train on and one to test, 10,000 pictures each: a byte for the class, then the pixels."""
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    with tarfile.open(archive) as tar:
        content = b"".join(tar.extractfile(f"cifar-10-batches-bin/{name}.bin").read() for name in names)
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, 1 + 3 * 32 * 32)
    return Pictures(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long())


@torch.no_grad()
def accuracy(net: nn.Module, data: Pictures, device: torch.device) -> float:
    """The share of pictures whose class it says."""
    net.eval()
    right = 0
    for at in range(0, len(data), 500):
        batch = data.part(at, at + 500)
        right += int((net(batch.pictures.to(device)).argmax(dim=1).cpu() == batch.classes).sum())
    net.train()
    return right / len(data)


def settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, help="a TOML file of these flags; flags beat it")
    parser.add_argument("--quick", action="store_true", help="a narrow AlexNet on small pictures")
    parser.add_argument("--passes", type=int, default=20, help="over the pictures to train on")
    parser.add_argument("--batch", type=int, default=64, help="pictures in a step of each rank")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--size", type=int, default=224, help="pixels to scale pictures to, from 63 on")
    parser.add_argument("--width", type=float, default=1.0, help="of the layers, as a share of AlexNet's")
    parser.add_argument("--made", type=int, default=45_000, help="pictures to make without a network")
    parser.add_argument("--data", default="~/.cache/diloco/cifar", help="where CIFAR-10 is or is to be put")
    first = parser.parse_args()
    named = tomllib.loads(first.config.read_text()) if first.config else {}
    if unknown := sorted(set(named) - set(vars(first))):
        parser.error(f"{first.config} sets {unknown[0]}, which is no flag of this program")
    parser.set_defaults(**{**(QUICK if first.quick or named.get("quick") else {}), **named})
    return parser.parse_args()


def main() -> None:
    chosen = settings()
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if num_ranks > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    net = AlexNet(size=chosen.size, width=chosen.width).to(device)
    training, validation, test = load(Path(chosen.data).expanduser(), chosen.made)
    steps = len(training) // (chosen.batch * num_ranks)
    outer = Diloco(net, max_steps=chosen.passes * steps)
    model = DistributedDataParallel(net) if num_ranks > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.lr)
    random = torch.Generator().manual_seed(outer.world_rank or 0)
    # A worker that was started again, or a peer that joins late, goes on with the pass that the swarm is in.
    for number in range(1 + outer.nominal_step // steps, chosen.passes + 1):
        order = torch.randperm(len(training), generator=random)[rank::num_ranks]
        for step in range(steps):
            indices = order[step * chosen.batch : (step + 1) * chosen.batch]
            pictures, classes = training.pictures[indices].to(device), training.classes[indices].to(device)
            loss = cross_entropy(model(pictures), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outer.step(num_tokens=len(indices), loss=loss.item())
            if outer.done:
                break
        if rank == 0:
            seen = accuracy(net, training.part(0, len(validation)), device)
            unseen = accuracy(net, validation, device)
            print(f"pass {number}: train accuracy {seen:.3f}, validation accuracy {unseen:.3f}", flush=True)
    outer.finish()
    if rank == 0:
        averaged = f", {outer.epoch} times averaged with other peers" if outer.active else ""
        print(f"test accuracy {accuracy(net, test, device):.3f} by {num_ranks} ranks{averaged}", flush=True)
    if num_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
