"""The models whose training DeepSpeed saves."""

import torch


class Model(torch.nn.Module):
    """Has what is awkward: odd sizes, a tied and a frozen parameter, a buffer."""

    def __init__(self, is_grouped):
        super().__init__()
        self.is_grouped = is_grouped
        self.embedding = torch.nn.Embedding(97, 16)
        self.first = torch.nn.Linear(16, 33)
        self.frozen = torch.nn.Linear(33, 33)
        self.norm = torch.nn.LayerNorm(33)
        self.second = torch.nn.Linear(33, 16)
        self.head = torch.nn.Linear(16, 97, bias=False)
        self.head.weight = self.embedding.weight
        self.odd = torch.nn.Linear(13, 7)
        self.register_buffer("seen", torch.arange(3, dtype=torch.float32))
        self.frozen.requires_grad_(not is_grouped)

    def forward(self, tokens):
        hidden = torch.nn.functional.gelu(self.first(self.embedding(tokens)))
        hidden = self.second(self.norm(self.frozen(hidden)))
        odd = self.odd.weight.float().sum() + self.odd.bias.float().sum()
        return self.head(hidden).float().logsumexp(-1).mean() + odd * 1e-3


class Block(torch.nn.Module):
    """Layers that tensor parallelism splits by rows and by columns."""

    is_grouped = True

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(97, 16)
        self.up = torch.nn.Linear(16, 34)
        self.down = torch.nn.Linear(34, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.register_buffer("seen", torch.arange(3, dtype=torch.float32))

    def forward(self, tokens):
        hidden = torch.relu(self.up(self.embedding(tokens)))
        return self.norm(self.down(hidden)).float().pow(3).mean()


def groups_of(model):
    """Return two parameter groups, as most trainings have, the tied one once."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
