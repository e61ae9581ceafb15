"""The text net: torch's own encoder is the oracle, and padding changes nothing."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import ArgumentError, MCDropout, NeuBoots, TrainingConfig
from neuboots.nets import TextTransformer
from neuboots.nets.text import EncoderBlock, Sinusoids


def make(**options: object) -> TextTransformer:
    defaults = {"width": 16, "depth": 2, "heads": 2, "max_length": 12}
    return TextTransformer(30, 3, **{**defaults, **options})  # type: ignore[arg-type]


def ids(rows: int = 4, length: int = 7) -> Tensor:
    return torch.randint(1, 30, (rows, length))


def padded(x: Tensor, left: int, right: int) -> Tensor:
    return nn.functional.pad(x, (left, right))


@torch.no_grad()
def test_encoder_block_matches_torch() -> None:
    """nn.TransformerEncoderLayer with the norm first, in training mode: without torch's fast path."""
    block = EncoderBlock(16, 4, 0.0).double()
    torchs = nn.TransformerEncoderLayer(
        16, 4, dim_feedforward=64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    ).double()
    norm, up, down = (block.feed_forward[i] for i in (0, 1, 4))
    attention = block.attention
    for layer in (attention.queries, attention.values, attention.project, up, down, block.attention_norm, norm):
        nn.init.normal_(layer.bias)  # type: ignore[arg-type]
    queries, keys, values = attention.queries, attention.keys, attention.values
    theirs = torchs.self_attn
    theirs.in_proj_weight.copy_(torch.cat([queries.weight, keys.weight, values.weight]))
    theirs.in_proj_bias.copy_(torch.cat([queries.bias, torch.zeros(16), values.bias]))
    pairs = [(theirs.out_proj, attention.project), (torchs.linear1, up), (torchs.linear2, down)]
    for their, our in [*pairs, (torchs.norm1, block.attention_norm), (torchs.norm2, norm)]:
        their.load_state_dict(our.state_dict())
    h = torch.randn(3, 5, 16).double()
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0]]).bool()
    found, wanted = block(h, real), torchs(h, src_key_padding_mask=~real)
    torch.testing.assert_close(found[real], wanted[real])


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_output_independent_of_padding_and_batch(positions: str, training: bool) -> None:
    net = make(positions=positions, dropout=0.0).double().train(training)
    x = ids()
    alone = torch.cat([net(row[None]) for row in x])
    for other in (x, padded(x, 0, 3), padded(x, 2, 9)):  # 18 tokens, of which max_length = 12 may be real
        torch.testing.assert_close(net(other), alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(net(x[[2, 0]]), alone[[2, 0]], rtol=0, atol=1e-12)
    longer = torch.cat([padded(x[:1], 0, 4), ids(2, 11)])
    torch.testing.assert_close(net(longer)[:1], alone[:1], rtol=0, atol=1e-12)


@torch.no_grad()
def test_output_depends_on_order_and_tokens() -> None:
    x = torch.tensor([[3, 4, 5]])
    for positions in ("learned", "sinusoidal"):
        net = make(positions=positions).double().eval()
        outs = [net(x), net(x.flip(1)), net(torch.tensor([[3, 4, 6]])), net(torch.tensor([[3, 4, 5, 5]]))]
        assert all((a - b).abs().max() > 1e-4 for i, a in enumerate(outs) for b in outs[:i])


def test_sinusoids_match_vaswani_et_al() -> None:
    table = Sinusoids(50, 7)(torch.arange(50))
    for t, i in [(0, 0), (1, 1), (49, 2), (30, 3)]:
        angle = torch.tensor(t / 10_000 ** (2 * i / 7))
        torch.testing.assert_close(table[t, 2 * i], angle.sin(), rtol=1e-4, atol=1e-5)
        if 2 * i + 1 < 7:
            torch.testing.assert_close(table[t, 2 * i + 1], angle.cos(), rtol=1e-4, atol=1e-5)


# -- methods -------------------------------------------------------------------------------------------


def test_int32_ids() -> None:
    net, x = make().eval(), ids()
    assert torch.equal(net(x.int()), net(x))


def rows(n: int) -> TensorDataset:
    """Whether token 7 is in the text, which has 3 to 8 tokens."""
    x = torch.randint(8, 30, (n, 8))
    x[torch.arange(8) >= torch.randint(3, 9, (n, 1))] = 0
    y = torch.arange(n) % 2
    x[y == 1, torch.randint(0, 3, (int(y.sum()),))] = 7
    return TensorDataset(x, y)


def test_neuboots_learns_a_token() -> None:
    train, test = rows(256), rows(200)
    config = TrainingConfig(epochs=12, batch_size=32, optimizer=partial(torch.optim.AdamW, lr=1e-2), progress=False)
    predictor = NeuBoots().fit(lambda: TextTransformer(30, 2, width=16, heads=2, depth=1), train, config)
    x, y = test.tensors
    summary = predictor.summarize(x, 10)
    right = (summary.labels == y).double().mean()
    assert right > 0.9, right  # chance is 0.5 with a standard error of 0.035


def test_mc_dropout_on_existing_dropout_ignores_padding() -> None:
    net = make(dropout=0.2).double()
    x = ids(3)
    predictor = MCDropout(where="existing").from_trained(net, (x, torch.zeros(3)))
    assert predictor.config()["layer_names"] == []
    blocks = [
        f"blocks.{i}.{name}" for i in range(2) for name in ("attention_dropout", "feed_forward.3", "feed_forward.5")
    ]
    dropped = dict(predictor.module.named_modules())
    assert all(dropped[name].rate == 0.2 for name in ["dropout", *blocks])  # type: ignore[union-attr]
    samples = predictor.predict(x, 5).samples
    assert samples.std(0).min() > 0
    torch.testing.assert_close(predictor.predict(padded(x, 0, 3), 5).samples, samples, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ids", [torch.tensor([[1, 2], [0, 0]]), torch.zeros(2, 0, dtype=torch.int64)])
def test_text_without_tokens_raises(ids: Tensor) -> None:
    with pytest.raises(ArgumentError, match="ids"):
        make()(ids)
