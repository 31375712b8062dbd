"""Train a small network on handwritten digits, on all devices of this machine."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.torch import DataParallel

EPOCHS = 4

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
labels = torch.tensor(digits.target)
loader = DataLoader(TensorDataset(images[:1347], labels[:1347]), batch_size=128, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 64), nn.ReLU(), nn.Linear(64, 10)
)
trainer = DataParallel(model)
optimizer = trainer.optimizer(torch.optim.AdamW, lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


for epoch in range(EPOCHS):
    total = 0.0
    for batch in loader:
        loss = trainer.step(loss_fn, batch)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item() * len(batch[0])
    scheduler.step()
    print(f"epoch {epoch + 1}: loss {total / 1347:.4f}")

model.eval()
answers = trainer.predict(images[1347:]).argmax(dim=1)
print(f"test accuracy: {(answers == labels[1347:]).double().mean().item():.1%}")
