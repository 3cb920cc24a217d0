"""`python -m benchmarks.timm_script FOLDER WEIGHTS`: fine-tune DeiT-tiny as an ordinary timm user would, in 40 lines.

FOLDER has train/CLASS/image and test/CLASS/image. The last line that it prints is the test accuracy.
"""

import sys

import timm
import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

folder, weights = sys.argv[1:3]
epochs, seed = (int(text) for text in (*sys.argv[3:5], "10", "0")[:2])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(seed)

normalize = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
crop = [transforms.RandomResizedCrop(224, scale=(0.5, 1)), transforms.RandomHorizontalFlip()]
train_data = ImageFolder(f"{folder}/train", transforms.Compose([*crop, transforms.ToTensor(), normalize]))
resize = [transforms.Resize(256), transforms.CenterCrop(224)]
test_data = ImageFolder(f"{folder}/test", transforms.Compose([*resize, transforms.ToTensor(), normalize]))
workers = 8 if device == "cuda" else 0
train_loader = DataLoader(train_data, batch_size=32, shuffle=True, num_workers=workers)
test_loader = DataLoader(test_data, batch_size=64, num_workers=workers)

source, num_classes = {"file": weights}, len(train_data.classes)
model = timm.create_model("deit_tiny_patch16_224", True, num_classes=num_classes, pretrained_cfg_overlay=source)
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(train_loader))

for epoch in range(epochs):
    model.train()
    for images, labels in train_loader:
        loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    print(f"epoch {epoch + 1} of {epochs}", flush=True)

model.eval()
with torch.no_grad():
    correct = sum((model(images.to(device)).argmax(1).cpu() == labels).sum().item() for images, labels in test_loader)
print(f"test accuracy {correct / len(test_data):.4f}")
