"""sample.py: the cache changes nothing, the sampling options do what they say."""
from types import SimpleNamespace

import pytest
import torch

import sample
from nanote import fp8, models
from trainer_tools import OPTIONS, make_tokens, run_script, run_train


def make_model(**options):
    torch.manual_seed(0)
    shape = dict(n_layer=2, n_head=4, n_embd=64, vocab_size=288, n_positions=32, use_fp8=True)
    config = models.make_model_config("optimized", shape | options)
    model = models.build_model("optimized", config)
    for parameter in model.parameters():  # as far from uniform as a trained model: greedy text then varies
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


LLAMA = dict(
    use_rmsnorm=True, use_rotary=True, use_qk_norm=True, activation="swiglu", bias=False, n_kv_head=2,
    tie_embeddings=False,
)


@pytest.mark.parametrize("options", [dict(tie_embeddings=False), LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("prompt_length", [1, 10, 32, 50])
def test_greedy_text_is_the_same_with_and_without_the_cache(options, prompt_length):
    model = make_model(**options)
    prompt = torch.randint(0, 257, (prompt_length,)).tolist()
    # the window slides
    texts = [
        sample.generate(model, prompt, 80, temperature=0, use_cache=use_cache) for use_cache in (True, False)
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 80 and len(set(texts[0])) > 5


def test_generation_runs_with_fp8_off_and_leaves_the_model_as_it_was():
    model = make_model().train()
    sample.generate(model, [1, 2, 3], 3)
    assert model.training and model.config.use_fp8
    assert fp8.get_state(model) == {}, "no FP8 product has run"


def draws(logits, count=4000, temperature=1.0, top_k=None, top_p=None):
    """How often each token is picked."""
    generator = torch.Generator().manual_seed(0)
    picked = [sample.pick(torch.tensor(logits), temperature, top_k, top_p, generator) for _ in range(count)]
    return [picked.count(token) / count for token in range(len(logits))]


LOGITS = torch.tensor([0.2, 0.5, 0.3]).log().tolist()


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(), [0.2, 0.5, 0.3]),
        (dict(temperature=0), [0, 1, 0]),
        (dict(temperature=0.5), [4 / 38, 25 / 38, 9 / 38]),
        (dict(top_k=2), [0, 5 / 8, 3 / 8]),
        (dict(top_k=1), [0, 1, 0]),
        (dict(top_k=9), [0.2, 0.5, 0.3]),
        (dict(top_p=0.4), [0, 1, 0]),
        (dict(top_p=0.6), [0, 5 / 8, 3 / 8]),
        (dict(top_p=0.79), [0, 5 / 8, 3 / 8]),
        (dict(top_p=1.0), [0.2, 0.5, 0.3]),
        (dict(top_k=2, top_p=0.62), [0, 1, 0]),
    ],
)  # of what top_k leaves, 5/8 is already 0.62
def test_sampling_options(options, expected):
    assert draws(LOGITS, **options) == pytest.approx(expected, abs=0.03)


def test_padding_rows_are_never_sampled_and_a_stop_token_ends_the_text():
    class Model(torch.nn.Module):
        """Counts up: after token t comes t + 1; rows above the vocabulary are likelier still."""
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.config = SimpleNamespace(n_positions=8, use_fp8=False)

        def forward(self, ids):
            logits = torch.nn.functional.one_hot((ids + 1) % 16, 16).float()
            logits[..., 12:] = 5.0
            return logits

    assert sample.generate(Model(), [3], 5, temperature=0, vocab_size=12) == [4, 5, 6, 7, 8]
    assert sample.generate(Model(), [3], 5, temperature=0, vocab_size=12, stop=6) == [4, 5, 6]
    assert sample.generate(Model(), [3], 1, temperature=0) == [12]


@pytest.mark.parametrize("options", [dict(temperature=1e-45), dict(temperature=1e-300), dict(top_p=1e-300),
                                     dict(top_p=1e-45), dict(top_k=1),
                                     dict(temperature=5e-324, top_p=5e-324, top_k=2**62)])
def test_extreme_options_take_the_likeliest_token(options):
    for logits in (LOGITS, [1e4, 1e4 + 1, 0.0], [-1e30, 1e30, 0.0]):
        assert draws(logits, 20, **options) == [0, 1, 0]


def test_a_large_temperature_makes_all_tokens_equally_likely():
    assert draws(LOGITS, temperature=1e308) == pytest.approx([1 / 3] * 3, abs=0.03)


def test_logits_that_are_not_finite_are_a_value_error():
    for logits in ([1.0, float("nan")], [1.0, float("inf")]):
        for temperature in (0, 1.0):
            with pytest.raises(ValueError, match="not finite"):
                sample.pick(torch.tensor(logits), temperature, None, None, None)


def test_the_cache_is_no_longer_than_the_text(monkeypatch):
    model = make_model(use_rotary=True, n_positions=2**40)
    assert len(sample.generate(model, [1, 2, 3], 5, temperature=0)) == 5


def test_wrong_arguments_are_value_errors():
    with pytest.raises(ValueError, match="ids is empty"):
        sample.generate(make_model(), [], 3)
    for options in (dict(temperature=-1), dict(temperature=float("nan")), dict(top_k=0), dict(top_p=1.5)):
        with pytest.raises(ValueError, match="such as"):
            sample.generate(make_model(), [1], 3, **options)


def test_the_command_line_reads_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        run_train(
            f"{OPTIONS} --max-steps 4 --checkpoint-interval 2 --out-dir run", make_tokens(tmp_path / "tokens")
        )
        == 0
    )
    capsys.readouterr()

    def text(*argv):
        assert run_script("sample.py", ["--max-new-tokens", "90", *argv]) == 0
        return capsys.readouterr().out

    greedy = text("run", "--prompt", "line ", "--temperature", "0")
    assert greedy.startswith("line ") and len(greedy) > 20
    assert greedy == text("run", "--prompt", "line ", "--temperature", "0", "--no-kv-cache")
    assert greedy == text("run/step-4", "--prompt", "line ", "--temperature", "0")
    assert text("run", "--seed", "1") != text("run/step-2", "--seed", "1")
    assert text("run", "--seed", "1") == text("run", "--seed", "1") != text("run", "--seed", "2")
    assert text("run", "--num-samples", "3").count("\n---\n") == 2
