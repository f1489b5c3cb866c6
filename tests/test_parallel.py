"""--parallel ddp, fsdp and hsdp in gloo processes: gradients, losses, FP8 scales and checkpoints as one's."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nanote import checkpoint, dataset, parallel, safetensors_files, slow_ranks
from nanote.config import TrainConfig
from nanote.metrics import Log, read_metrics
from trainer_tools import ROOT, metrics, run_groups, run_train

EPS = 2.0**-24  # rounding error of float32
# 67 positions: the parts of the ranks differ in size
OPTIONS = (
    "--n-layer 2 --n-head 2 --n-embd 64 --no-use-rotary --bias --n-positions 67 --seq-len 64 --grad-accum 2 "
    "--max-steps 4 --warmup-steps 2 --lr-schedule constant --fp8-amax-history-len 8 --log-interval 1 "
    "--eval-interval 0 --eval-tokens 700 --checkpoint-interval 1 --keep-checkpoints 9 --device cpu"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokens):
    """Make the runs that the tests compare, and change to their folder: 4 steps of 8 sequences each.

    Return what those with several ranks printed.
    """
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("runs"))
    options = f"{OPTIONS} --data {tokens}"
    none, delayed = f"{options} --fp8-recipe none", f"{options} --fp8-recipe delayed"
    two, four = "--micro-batch-size 2", "--micro-batch-size 4"
    assert run_train(f"{none} {four} --out-dir one") == 0
    assert run_train(f"{delayed} {four} --out-dir one-fp8") == 0
    printed = run_groups(
        "2", "weights", "raised", "gathers",
        f"{none} {two} --parallel fsdp --out-dir fsdp",
        f"{none} {two} --parallel fsdp --gradient-checkpointing --no-reshard-after-forward "
        "--grad-reduce-dtype float32 --out-dir fsdp-switches",
        f"copies {none} {two} --parallel fsdp --out-dir fsdp-copies",
        f"copies {none} {two} --parallel fsdp --gradient-checkpointing --no-reshard-after-forward "
        "--grad-reduce-dtype float32 --out-dir copies-switches",
        f"{none} {two} --out-dir ddp",
        f"{delayed} {two} --parallel fsdp --out-dir fsdp-fp8", f"{delayed} {two} --out-dir ddp-fp8",
        "copy fsdp fsdp-fsdp 2", "--resume --out-dir fsdp-fsdp",
        "copy fsdp fsdp-ddp 2", "--resume --parallel ddp --out-dir fsdp-ddp",
        "copy ddp ddp-fsdp 2", "--resume --parallel fsdp --out-dir ddp-fsdp",
        "copy one one-fsdp 2", f"--resume --parallel fsdp {two} --out-dir one-fsdp",
        f"nan {none} {two} --parallel fsdp --max-steps 2 --out-dir skipped",
        f"waits {none} {two} --max-steps 2 --out-dir waited",
        f"full {none} {two} --max-steps 2 --out-dir full-disk",
        f"full {none} {two} --max-steps 2 --parallel fsdp --out-dir full-disk-fsdp",
        "4", "parts", "gathers",
        "copy fsdp fsdp-hsdp 2",
        "--resume --parallel hsdp --hsdp-replicas 2 --micro-batch-size 1 --out-dir fsdp-hsdp",
        "copy fsdp copies-hsdp 2",
        "copies --resume --parallel hsdp --hsdp-replicas 2 --micro-batch-size 1 --out-dir copies-hsdp",
        "copy fsdp copies-four 2", "copies --resume --micro-batch-size 1 --out-dir copies-four",
    )
    shutil.copytree("fsdp-hsdp", "hsdp-one")
    shutil.rmtree("hsdp-one/step-4")
    assert run_train(f"--resume {four} --out-dir hsdp-one") == 0
    yield printed
    os.chdir(before)


def stored(run, step, prefix="") -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint in one piece each."""
    folder = Path(run, f"step-{step}")
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype)
               for name, entry in safetensors_files.stored_tensors(folder).items() if name.startswith(prefix)}
    safetensors_files.load(tensors, folder)
    return tensors


@pytest.mark.parametrize("run", ["ddp", "fsdp", "fsdp-switches"])
def test_gradients_of_two_ranks_are_those_of_one(runs, run):
    """After one step exp_avg is (1 - beta1) times the clipped gradient, reduced over 2 micro-batches."""
    expected, found = (stored(folder, 1, "optimizer.") for folder in ("one", run))
    assert expected.keys() == found.keys() and any(name.endswith("wpe.weight.exp_avg") for name in found)
    for name, value in expected.items():
        if name.endswith(".exp_avg"):
            # a sum over 512 tokens in another order: its error grows with the square root of their number
            assert (found[name] - value).abs().max() <= 2 * 512**0.5 * EPS * value.abs().max(), name


@pytest.mark.parametrize("run", [
    "ddp", "fsdp", "fsdp-switches", "fsdp-fsdp", "fsdp-ddp", "ddp-fsdp", "one-fsdp", "fsdp-hsdp", "hsdp-one",
    "copies-hsdp", "copies-four"])
def test_losses_do_not_depend_on_the_ranks(runs, run):
    for field in ("loss", "grad_norm", "val_loss"):
        expected, found = ([r[field] for r in metrics(folder) if field in r] for folder in ("one", run))
        assert found == pytest.approx(expected, rel=1e-5), field


def test_resuming_on_as_many_ranks_is_exact(runs):
    assert metrics("fsdp-fsdp") == metrics("fsdp")
    for shard in (1, 2):
        name = f"step-4/shard-0000{shard}-model-00001-of-00001.safetensors"
        whole, resumed = load_file(f"fsdp/{name}"), load_file(f"fsdp-fsdp/{name}")
        whole = {key: value for key, value in whole.items() if ".host" not in key}  # Python's own generator
        assert all(torch.equal(resumed[key], value) for key, value in whole.items())
        assert len(whole["model.wpe.weight"]) == (34 if shard == 1 else 33), "each rank writes its part"


def test_copies_gather_and_reduce_as_collectives_do(runs):
    """Two ranks: a sum of two gradients has no order."""
    assert metrics("fsdp-copies") == metrics("fsdp")
    assert metrics("copies-switches") == metrics("fsdp-switches")


def test_ranks_of_ddp_divide_the_writing(runs):
    """`stored` refuses a tensor that is written twice."""
    one, two = (path.stat().st_size for path in sorted(Path("ddp/step-4").glob("*.safetensors")))
    assert 0.8 < one / two < 1.25
    assert stored("ddp", 4).keys() >= stored("one", 4).keys()


@pytest.mark.parametrize("run", ["full-disk", "full-disk-fsdp"])
def test_a_full_disk_of_one_rank(runs, run):
    """The run continues, and the next checkpoint is written."""
    assert [path.name for path in checkpoint.list_checkpoints(run)] == ["step-2"]
    said, = [line for line in runs.splitlines() if f"{run}/step-1 not written" in line]
    assert "No space left on device" in said and "training continues" in said
    assert len(metrics(run)) == 2


@pytest.mark.parametrize("run", ["ddp-fp8", "fsdp-fp8"])
def test_two_ranks_use_the_fp8_scales_of_one(runs, run):
    """amax is reduced over the ranks, and gradients have the size that they have in one process."""
    expected, found = (stored(folder, 1, "fp8.") for folder in ("one-fp8", run))
    scales = [name for name in expected if name.endswith(".scale")]
    assert scales and expected.keys() == found.keys()
    for name in scales:
        # gradients pass GEMMs in which a sum in another order may round to another FP8 value, 2^-4 away
        tolerance = 2.0**-4 if "_bwd" in name else 1e-3
        assert found[name].numpy() == pytest.approx(expected[name].numpy(), rel=tolerance), name
    losses = [[record["loss"] for record in metrics(folder)] for folder in ("one-fp8", run)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_all(runs):
    before, after = stored("skipped", 1, "model."), stored("skipped", 2, "model.")
    assert all(torch.equal(after[name], value) and value.isfinite().all() for name, value in before.items())


def test_the_log_names_the_slowest_rank(runs, capsys, tmp_path):
    records = read_metrics(Path("waited", "metrics.jsonl"))
    assert [record["slowest_rank"] for record in records] == [1, 1]
    assert all(record["slowest_ratio"] > 5 for record in records), "a step takes less than 2 seconds"
    assert all("slowest_rank" not in record for record in read_metrics(Path("one", "metrics.jsonl")))
    log = Log(str(tmp_path), 1, 2, enabled=True)
    for ratio in (1.0, 1.25):
        log.write(records[0] | {"slowest_ratio": ratio})
    log.close()
    quiet, named = capsys.readouterr().out.splitlines()
    assert named == f"{quiet}  rank 1 is slow: 1.25 x the median rank"


def test_the_slowest_rank_is_compared_with_the_median():
    gemms = [[1.0, 0.0], [1.02, 0.0], [1.3, 0.0], [0.98, 0.0]]
    assert slow_ranks.slowest(gemms) == {"slowest_rank": 2, "slowest_ratio": pytest.approx(1.3)}
    # steps of 100, 100 and 300 ms alone, of which ranks compute 100, 90 and 100 ms
    waits = [[1.0, 0.0], [0.9, 10 / 300], [1.0, 200 / 300]]
    found = slow_ranks.slowest(waits)
    assert found == {"slowest_rank": 2, "slowest_ratio": pytest.approx(3, rel=0.01)}


def test_a_rank_times_itself_between_log_lines(one_process_group, tokens, monkeypatch):
    loader = dataset.Loader(tokens, "train", seq_len=64, micro_batch_size=2)
    loader.batch(0)
    loader.close()
    found = slow_ranks.SlowestRank(loader, torch.device("cpu"))
    assert loader.seconds_waited > 0
    monkeypatch.setattr(slow_ranks, "slowest", lambda ranks: ranks)
    for seconds in (3.0, 0.0):
        loader.seconds_waited += seconds
        (gemm_ms, waited), = found.find(steps=10, step_ms=600.0)
        assert gemm_ms == 1.0 and waited == pytest.approx(seconds / 10 / 0.6)


@pytest.mark.gpu
def test_a_rank_times_a_gemm_on_its_gpu(tokens):
    loader = dataset.Loader(tokens, "train", seq_len=64, micro_batch_size=2)
    loader.close()
    times = [slow_ranks.SlowestRank(loader, torch.device("cuda")).gemm_ms() for _ in range(3)]
    flops = 2 * slow_ranks.GEMM_SIZE**3
    assert all(1e12 < flops / (1e-3 * ms) < 1e16 for ms in times), "between a laptop's and tomorrow's GPU"


def test_ranks_read_different_samples(tokens):
    loaders = [dataset.Loader(tokens, "train", seq_len=64, micro_batch_size=2, rank=rank, world_size=2)
               for rank in range(2)]
    samples = [{tuple(row) for i in range(5) for row in loader.batch(i)[0].tolist()} for loader in loaders]
    for loader in loaders:
        loader.close()
    assert len(samples[0]) == len(samples[1]) == 10 and not samples[0] & samples[1]


def test_one_process_trains_the_same_with_fsdp(runs, tokens):
    options = f"{OPTIONS} --data {tokens} --fp8-recipe none --micro-batch-size 4 --max-steps 2"
    assert run_train(f"{options} --parallel fsdp --out-dir alone") == 0
    assert metrics("alone")[0] == metrics("one")[0]


# ---------------------------------------------------------------- errors

@pytest.mark.parametrize("options, told", [
    ("--parallel fsdp --fp8-param", "leave --fp8-param out"),
    ("--parallel fsdp --optimizer muon", "pass --optimizer adamw"),
    ("--parallel hsdp --offload-activations 1", "does not go with --offload-activations"),
    ("--parallel fsdp --compile --fp8-recipe none", "leave --compile out"),
    ("--parallel hsdp --hsdp-replicas 0", "must be at least 1"),
    ("--parallel fsdp --grad-accum-dtype float32", "pass --grad-reduce-dtype float32")])
def test_options_that_do_not_go_together(options, told, capsys, tokens, tmp_path):
    assert run_train(f"{options} --device cpu --data {tokens} --out-dir {tmp_path / 'run'}") == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.fixture
def one_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_replicas_divide_the_processes(one_process_group):
    with pytest.raises(ValueError, match="--hsdp-replicas 3: must divide .* processes, 1; pass one of 1$"):
        parallel.shard_count(TrainConfig(parallel="hsdp", hsdp_replicas=3))


def test_a_model_without_blocks_is_not_sharded(one_process_group):
    with pytest.raises(ValueError, match="Linear has no model.blocks"):
        parallel.shard(torch.nn.Linear(2, 2), TrainConfig(parallel="fsdp"), torch.device("cpu"))


@pytest.mark.parametrize("ranks, code, cleans_up", [("1", 0, True), ("2", 0, False), ("2", 3, True)])
def test_a_finished_rank_exits_without_the_cleanup_in_which_gloo_can_abort(ranks, code, cleans_up):
    script = ("import atexit; from nanote import elastic; atexit.register(print, 'cleaned up'); "
              f"print('all written'); elastic.exit_process({code})")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=os.environ | {"WORLD_SIZE": ranks},
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == code and done.stdout.startswith("all written\n")
    assert ("cleaned up" in done.stdout) == cleans_up
