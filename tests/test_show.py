"""What people are shown of a cache: figures of its reports, in HTML that is well formed, and in plots."""

import copy
import errno
import os
import re
import sys
from html.parser import HTMLParser

import pytest
import torch
from tiny import forward, generate, llama, mistral, qwen3_next, random_states, token_ids
from transformers import EncoderDecoderCache

from memos_hf import CacheStats, DeviceMemory, KVQuantizationConfig, MemOSCache, OffloadConfig
from memos_hf.report import LayerMemory, MemoryReport, format_bytes


class Shown(HTMLParser):
    """A page's text and the styles and titles of its elements; raises where elements are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.tags, self.text, self.styles, self.titles = [], set(), [], [], []
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        self.styles.append(dict(attrs).get("style") or "")
        self.titles.append(dict(attrs).get("title") or "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def widths(self, style: str) -> list[float]:
        """Percent that the bars of this style take of what they lie in."""
        return [
            float(found[1]) for each in self.styles if style in each and (found := re.search(r"width:([\d.]+)%", each))
        ]


def filled(tokens: int = 60, rows: int = 1, **options) -> MemOSCache:
    cache = MemOSCache(llama().config, **options)
    generate(llama(), token_ids(rows, tokens), cache, 5)
    return cache


def offloaded(**options) -> MemOSCache:
    return filled(160, offload=OffloadConfig({"cpu": 40_000}, **options), block_size=8)


def released() -> MemOSCache:
    cache = filled()
    cache.release()
    return cache


def parked() -> MemOSCache:
    cache = offloaded()
    cache.offload_all()
    return cache


def sliding() -> MemOSCache:
    cache = MemOSCache(mistral().config)
    generate(mistral(), token_ids(1, 40), cache)
    return cache


def recurrent() -> MemOSCache:
    cache = MemOSCache(qwen3_next().config)
    generate(qwen3_next(), token_ids(1, 20), cache)
    return cache


CACHES = {
    "empty": MemOSCache,
    "empty, of a model": lambda: MemOSCache(llama().config),
    "contiguous": filled,
    "quantized": lambda: filled(300, 2, quantization="int4"),
    "offloaded": offloaded,
    "parked": parked,
    "static": lambda: filled(static=True, max_cache_len=96),
    "fork": lambda: filled(300).fork(repeats=2),
    "released": released,
    "sliding": sliding,
    "recurrent": recurrent,
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_shows_the_figures_of_its_reports(name):
    cache = CACHES[name]()
    memory, stats = cache.memory(), cache.stats
    pages = [Shown(each._repr_html_()) for each in (cache, memory, stats)]
    text = " ".join(pages[0].text)
    assert pages[0].tags == {"div", "b"}
    assert f"MemOSCache {cache.get_seq_length() if cache.layers else 0}" in re.sub(r"\s+", " ", text)
    for device, held in memory.by_device.items():
        assert device in pages[0].text
        assert f"{format_bytes(held.used_bytes)} used of {format_bytes(held.allocated_bytes)}" in text
    assert not memory.shared_bytes or f"{format_bytes(memory.shared_bytes)} shared" in text
    assert not stats.seals or f"blocks sealed {stats.seals:,}" in text
    assert not stats.misses or f"{stats.hits:,} on the device, {stats.misses:,} below it" in text
    assert set(pages[1].text) <= set(pages[0].text)
    assert not stats.seals or set(pages[2].text) <= set(pages[0].text)
    for line in (repr(cache), repr(memory), repr(stats)):
        assert "\n" not in line and len(line) < 200


def test_what_a_cache_is_stands_in_its_first_line():
    first = {name: "".join(Shown(CACHES[name]()._repr_html_()).text[:2]) for name in CACHES}
    assert first["empty"] == "MemOSCache 0 tokens · full precision"
    assert first["contiguous"] == "MemOSCache 64 of 256 tokens · full precision"
    assert first["quantized"] == "MemOSCache 304 tokens · int4"
    assert first["offloaded"] == "MemOSCache 164 tokens · full precision, offloaded (pin)"
    assert first["static"] == "MemOSCache 64 of 96 tokens · static, full precision"
    assert first["sliding"].startswith("MemOSCache 51 tokens")
    assert first["released"].endswith("released")
    own = KVQuantizationConfig(4, 8, rotation="hadamard")
    cache = filled(quantization=own, offload=OffloadConfig({"cpu": "1GiB"}, active_blocks=7), block_size=16)
    assert cache.options.mode == (
        "keys int4 by token, values int8 by token, hadamard, offloaded (lru, 7 active blocks of 16 tokens)"
    )


def test_a_torn_cache_says_so_and_is_escaped(tmp_path, monkeypatch):
    model = qwen3_next()
    cache = MemOSCache(model.config, offload=OffloadConfig({"cpu": 8_000}, tmp_path), block_size=8)

    def fails(*arguments):
        raise OSError(errno.EIO, "<script>Input/output error</script>")

    with torch.no_grad():
        forward(model, token_ids(1, 60), cache)
        monkeypatch.setattr(os, "preadv", fails)
        with pytest.raises(OSError):
            forward(model, token_ids(1, 1), cache)
    page = Shown(cache._repr_html_())
    assert "script" not in page.tags
    assert "torn, to be reset" in "".join(page.text) and "<script>" in "".join(page.text)


def test_both_parts_of_an_encoder_decoder_cache_show_themselves():
    pair = EncoderDecoderCache(MemOSCache(), MemOSCache())
    for cache, tokens in ((pair.self_attention_cache, 3), (pair.cross_attention_cache, 9)):
        cache.update(*random_states(tokens=tokens), 0)
        assert f" {tokens} of 256 tokens" in "".join(Shown(cache._repr_html_()).text)


def test_bars_are_as_long_as_what_they_stand_for():
    memory = filled(300, quantization="int8").fork().memory()
    page, (held,) = Shown(memory._repr_html_()), memory.by_device.values()
    most = max(memory.full_precision_bytes, held.allocated_bytes)
    own, shared = held.used_bytes - held.shared_bytes, held.shared_bytes
    assert shared > 0
    expected = [100 * part / most for part in (own, shared) if part]
    assert page.widths("background:#4a90d9") == pytest.approx(expected, abs=0.01)
    free = 100 * (held.allocated_bytes - held.used_bytes) / most
    assert page.widths("background:rgba(128") == pytest.approx([free], abs=0.01)
    assert page.widths("dashed") == pytest.approx([100 * memory.full_precision_bytes / most], abs=0.01)
    halves = Shown(CacheStats(hits=30, misses=90)._repr_html_())
    assert halves.widths("background:#4a90d9") == [25] and halves.widths("background:#e08e3c") == [75]


def test_layers_of_a_report_add_up_to_it():
    for name, make in CACHES.items():
        memory = make().memory()
        assert sum(layer.used_bytes for layer in memory.by_layer) == memory.used_bytes, name
        assert sum(layer.full_precision_bytes for layer in memory.by_layer) == memory.full_precision_bytes, name
        for device, held in memory.by_device.items():
            assert sum(layer.used_by_device.get(device, 0) for layer in memory.by_layer) == held.used_bytes, name


def test_equal_layers_share_a_column_and_eighty_different_ones_are_small():
    alike, different = MemOSCache(), MemOSCache()
    for layer_idx in range(80):
        alike.update(*random_states(tokens=5), layer_idx)
        different.update(*random_states(tokens=5 + layer_idx % 7), layer_idx)
    pages = [cache._repr_html_() for cache in (alike, different)]
    columns = [[title for title in Shown(page).titles if title.startswith("layer")] for page in pages]
    assert [len(each) for each in columns] == [1, 80]
    assert columns[0] == [f"layers 0 to 79, each: ContiguousLayer, cpu {format_bytes(5 * 2 * 2 * 8 * 4)}"]
    assert max(map(len, pages)) < 32_000


def test_names_are_escaped():
    odd = '<img src="x">&'
    memory = MemoryReport(1, 1, 0, 1, {odd: DeviceMemory(1, 1, 0)}, (LayerMemory(odd, {odd: 1}, 0, 1),))
    page = Shown(memory._repr_html_())
    assert page.tags == {"div"} and odd in page.text


def test_the_plot_of_a_report_has_the_bytes_of_each_layer():
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    memory = offloaded().memory()
    axes = memory.plot()
    heights = sum(bar.get_height() for bars in axes.containers for bar in bars)
    assert heights * 2**20 == pytest.approx(memory.used_bytes)
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"cpu", "disk", "full precision"}
    (_, own) = plt.subplots(1, 2)[1]
    assert filled().fork().memory().plot(own) is own
    assert "shared, hatched" in {text.get_text() for text in own.get_legend().get_texts()}
    for each in CACHES.values():
        own.clear()
        each().memory().plot(own)
    plt.close("all")


def test_the_plot_of_counters_has_their_shares():
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    axes = CacheStats(hits=30, misses=90, fused_calls=5, growths=2).plot()
    assert sorted(bar.get_width() for bars in axes.containers for bar in bars) == [0, 0.25, 0.75, 1]
    assert {text.get_text() for text in axes.texts} == {"30 on the device", "90 below it", "5 in place", "0 decoding"}
    assert axes.get_title().startswith("2 growths")
    own = plt.subplots()[1]
    assert CacheStats().plot(own) is own
    plt.close("all")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for report in (MemOSCache().memory(), CacheStats()):
        with pytest.raises(ImportError, match=r"pip install 'memos_hf\[plots\]'"):
            report.plot()


def test_looking_neither_brings_back_what_was_moved_out_nor_changes_a_figure():
    for name, make in CACHES.items():
        cache = make()
        before = cache.memory(), cache.stats, [copy.copy(vars(layer)) for layer in cache.layers]
        cache._repr_html_(), repr(cache)
        after = cache.memory(), cache.stats, [copy.copy(vars(layer)) for layer in cache.layers]
        assert before[:2] == after[:2], name
        for then, now in zip(before[2], after[2], strict=True):
            assert all(then[key] is now[key] or then[key] == now[key] for key in then), name


def test_an_offloaded_layer_says_which_blocks_its_newest_call_chose():
    cache = offloaded(active_blocks=3)
    for layer in cache.layers:
        ((first, *others),) = layer.last_selected
        assert first == 0 and len(others) == 2 and others == sorted(set(others))
    with torch.no_grad():
        forward(llama(), token_ids(1, 100), cache)
    assert [layer.last_selected for layer in cache.layers] == [None] * 3, "prompts read all"


def test_a_device_has_one_colour_in_all_bars():
    devices = {"cuda:0": DeviceMemory(2, 2, 0), "cpu": DeviceMemory(1, 1, 0)}
    layer = LayerMemory("BlockLayer", {"cpu": 1, "cuda:0": 2}, 0, 3)
    page = Shown(MemoryReport(3, 3, 0, 3, devices, (layer,))._repr_html_())
    orange = [style for style in page.styles if "#e08e3c" in style]
    assert len(orange) == 2 and "width:33.33%" in orange[0] and "height:33.33%" in orange[1]
