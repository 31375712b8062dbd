"""Train a small network on handwritten digits, with plain PyTorch."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
labels = torch.tensor(digits.target)
loader = DataLoader(TensorDataset(images[:1347], labels[:1347]), batch_size=128, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 64), nn.ReLU(), nn.Linear(64, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

for epoch in range(EPOCHS):
    total = 0.0
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item() * len(x)
    scheduler.step()
    print(f"epoch {epoch + 1}: loss {total / 1347:.4f}")

model.eval()
with torch.no_grad():
    answers = model(images[1347:]).argmax(dim=1)
print(f"test accuracy: {(answers == labels[1347:]).double().mean().item():.1%}")
