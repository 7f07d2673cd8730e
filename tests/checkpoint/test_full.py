"""Full checkpoints: one file that plain torch reads, and any degrees resume from; and files of other programs."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import runtime
from smp.checkpoint import reader
from smp.checkpoint.__main__ import main
from tests.checkpoint.small import Job, assert_close, assert_equal, grid
from tests.harness import on_ranks
from tests.parity import models
from tests.stateful import shared_directory
from tests.test_state_dict import LiveBytes
from tests.tp import test_hf_decoders


@on_ranks(4, config=grid(pp=2, tp=2), timeout=300)
def test_a_full_checkpoint_resumes_on_any_degrees_and_in_plain_torch():
    """Weights, optimizer state and user content; resumed before the model is partitioned and after."""
    with shared_directory() as path:
        job = Job(grid(pp=2, tp=2))
        job.steps(0, 1)
        state = job.model.state_dict()
        smp.save_checkpoint(path, "2", partial=False, model=job.model, optimizer=job.optimizer, user_content={"at": 2})
        expected = job.steps(2, 3)
        plain = torch.load(path / "2", weights_only=True)
        assert plain.keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in plain.items())
        for pp, tp, partitioned in [(2, 2, True), (1, 2, False), (4, 1, False), (1, 4, True)]:
            job = Job(grid(pp=pp, tp=tp))
            if partitioned:
                job.step(0)
            assert smp.resume_from_checkpoint(path, partial=False) == {"at": 2}
            (assert_equal if (pp, tp) == (2, 2) else assert_close)(job.steps(2, 3), expected)


@on_ranks(1, config={"bf16": True, "ddp": True})
def test_masters_and_loss_scale_are_in_a_full_checkpoint_too():
    """Half precision weights alone would continue with rounded ones; the command line finds the masters as well."""
    with shared_directory() as path:
        job = Job({**grid(), "bf16": True}, dtype=None)
        job.steps(0, 1)
        job.save(path, "full", partial=False)
        job.save(path, "parts")
        expected = job.steps(2, 3)
        job = Job({**grid(), "bf16": True}, dtype=None)
        smp.resume_from_checkpoint(path, "full", partial=False)
        assert_equal(job.steps(2, 3), expected)
        assert main(["verify", str(path)]) == 0
        assert main(["diff", str(path / "full"), str(path / "parts_partial")]) == 0
        assert main(["consolidate", str(path / "full"), str(path / "out.pt")]) == 0
        masters = torch.load(path / "optimizer_full")
        loaded = torch.load(path / "out.pt")
        for name, master in masters["_smp_fp32_masters"].items():
            assert torch.equal(loaded[name], master)


# Memory and bytes


WIDTH, LAYERS = 64, 8
LARGEST = WIDTH * WIDTH * 4  # bytes of a weight


def forwarded(config: dict[str, Any]) -> Any:
    """A model of equal weights, all cut, after a step."""
    runtime.reset()
    smp.init(config)
    torch.manual_seed(smp.rank())
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    smp.set_tensor_parallelism(net)
    for number, layer in enumerate(net):
        smp.set_partition(layer, number * smp.pp_size() // LAYERS)
    model = smp.DistributedModel(net)

    @smp.step
    def forward(x: Tensor) -> Tensor:
        return model(x).sum()

    forward(torch.ones(2, WIDTH))
    return model


class Allocated(LiveBytes):
    """Does not count files that are mapped into memory."""

    MAPPED = (torch.ops.aten.set_.source_Storage_storage_offset, torch.ops.aten.from_file.default)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in self.MAPPED:
            return super().__torch_dispatch__(func, types, args, kwargs)
        result = func(*args, **(kwargs or {}))
        storage = result.untyped_storage()
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._known.discard, storage._cdata)
        return result


@on_ranks(4, config=grid(pp=2, tp=2), timeout=200)
def test_no_rank_holds_more_of_a_full_checkpoint_than_its_part_and_one_tensor():
    """Where every rank loads all and cuts, or gathers all to write it, memory runs out with models that just fit; and
    where every rank reads the whole file, loading takes hours."""
    with shared_directory() as path:
        model = forwarded(grid(pp=2, tp=2))
        with LiveBytes() as live:
            smp.save_checkpoint(path, "x", partial=False, model=model)
        assert live.peak <= (LAYERS * LARGEST + 2 * LARGEST if smp.rank() == 0 else LARGEST)
        saved = torch.load(path / "x")
        size = sum((path / name).stat().st_size for name in ("x", "user_content_x"))
        for foreign in (False, True):
            smp.barrier()
            if foreign and smp.rank() == 0:
                (path / "x.manifest.json").unlink()
            smp.barrier()
            model = forwarded(grid(pp=2, tp=2))
            reader.traffic.copied = reader.traffic.verified = 0
            with Allocated() as live:
                smp.resume_from_checkpoint(path, "x", partial=False)
            assert live.peak <= LARGEST
            told = smp.allgather((reader.traffic.copied, reader.traffic.verified))
            copied, verified = map(sum, zip(*told))
            assert copied == LAYERS * LARGEST and copied < verified <= size
            state = model.state_dict()
            assert all(torch.equal(value, state[name]) for name, value in saved.items())


# Models of transformers, and files of other programs


def gpt2() -> nn.Module:
    return test_hf_decoders.gpt2(n_layer=2)


def model_of(config: dict[str, Any], seed: int, marked: bool = True, partitioned: bool = True) -> Any:
    """GPT-2 with tied embeddings and a vocabulary that does not divide; its twins have other names."""
    runtime.reset()
    smp.init(config)
    torch.manual_seed(seed)
    module = gpt2().eval()
    if marked:
        smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    if partitioned:
        logits_of(model)
    return model


def logits_of(model: Any) -> Tensor:
    ids = torch.arange(8).view(1, 8) % test_hf_decoders.VOCABULARY

    @smp.step
    def forward(ids: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False, return_dict=True).logits

    model.eval()
    with torch.no_grad():
        return forward(ids).concat()


AUTO = {"ddp": True, "microbatches": 1, "prescaled_batch": True}
TP, PP, BOTH = (
    {**AUTO, "tensor_parallel_degree": tp, "pipeline_parallel_degree": pp, "auto_partition": True}
    for tp, pp in [(4, 1), (1, 4), (2, 2)]
)


@on_ranks(4, config=BOTH, timeout=300)
def test_hugging_face_reads_what_was_saved_and_the_other_way_round():
    """Names, shapes and bits of every tensor, the tied ones and the padded vocabulary too; from a full checkpoint, from
    what the command line makes of a partial one, and back on other degrees from plain files."""
    with shared_directory() as path:
        model = model_of(BOTH, seed=1)
        smp.save_checkpoint(path, "full", partial=False, model=model)
        smp.save_checkpoint(path, "ours", partial=False, model=model, translate_if_full=False)
        smp.save_checkpoint(path, "parts", model=model)
        smp.barrier()
        plain = gpt2().eval()
        plain.load_state_dict(torch.load(path / "full"))
        ids = torch.arange(8).view(1, 8) % test_hf_decoders.VOCABULARY
        with torch.no_grad():
            assert torch.allclose(logits_of(model), plain(input_ids=ids).logits, rtol=1e-5, atol=1e-6)
        if smp.rank() == 0:
            assert main(["consolidate", str(path / "parts_partial"), str(path / "export")]) == 0
            assert main(["consolidate", str(path / "parts_partial"), str(path / "pytorch_model.pt")]) == 0
            assert main(["diff", str(path / "parts_partial"), str(path / "full"), "--only", "model"]) == 0
            assert main(["diff", str(path / "ours"), str(path / "full"), "--only", "model"]) == 0
            (path / "export" / "config.json").write_text(plain.config.to_json_string())
            cls = test_hf_decoders.transformers.AutoModelForCausalLM
            loaded, notes = cls.from_pretrained(path / "export", output_loading_info=True)
            assert not any(notes.values()), notes
            assert same(loaded.state_dict(), plain.state_dict())
            consolidated = torch.load(path / "pytorch_model.pt")
            assert same(consolidated, plain.state_dict())
            masks = {f"transformer.h.0.attn.{name}": torch.ones(1) for name in ("bias", "masked_bias")}
            torch.save({**plain.state_dict(), **masks}, path / "old.bin")  # as older versions wrote them
            (path / "export" / "model.safetensors").rename(path / "model.safetensors")
        smp.barrier()
        wanted = model.state_dict()
        whole = plain.state_dict()
        for config, marked, partitioned, tags in [
            (TP, True, True, ("full", "ours", "pytorch_model.bin")),
            (PP, False, False, ("ours", "full")),
            (BOTH, True, False, ("ours", "old.bin")),
        ]:
            for tag in tags:
                model = model_of(config, seed=2, marked=marked, partitioned=partitioned)
                smp.resume_from_checkpoint(path, tag, partial=False, load_optimizer=False)
                logits_of(model)
                assert same(model.state_dict(), wanted if marked else whole), (tag, config)


FAMILIES = {"gptneox": test_hf_decoders.gptneox, "bert": models.bert, "llama": models.llama}


@pytest.mark.parametrize("name", FAMILIES)
@on_ranks(2, config={"ddp": True, "tensor_parallel_degree": 2})
def test_hugging_face_reads_what_the_command_line_makes_of_any_family(name: str) -> None:
    """Families that other tables of names, or a plan, have split: a failure means that a trained model is exported as
    another one."""
    torch.manual_seed(smp.rank())
    module = FAMILIES[name]().eval()
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    ids = torch.arange(8).view(1, 8) % models.VOCABULARY
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    with shared_directory() as path:
        smp.save_checkpoint(path, "parts", model=model)
        if smp.rank() == 0:
            assert main(["consolidate", str(path / "parts_partial"), str(path / "export")]) == 0
            (path / "export" / "config.json").write_text(module.config.to_json_string())
            loaded, notes = type(module).from_pretrained(path / "export", output_loading_info=True)
            assert not any(notes.values()), notes
            with torch.no_grad():
                assert torch.allclose(loaded.eval()(input_ids=ids).logits, logits, rtol=1e-5, atol=1e-6)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
