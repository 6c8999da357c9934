"""A PyTorch golden of one Qwen3 A8W8 decode layer (docs/numerics.md, Decode layer), as teams write it, on a CPU.

The peer of `assay bench --peer torch`. It differs in one thing only between its forms: how the INT8 products are
done.

    f32_held    weights are converted to float32 once and held so; products in float32
    converted   weights are held as stored (INT8, BF16) and converted to float32 at each call
    int_mm      INT8 products by torch._int_mm, with INT32 sums; the BF16 down projection as in `converted`

Everything else is vectorized over rows, heads and tiles as far as the contract lets it be; only the combination of
softmax tiles is a loop. It needs torch and nothing else.

    python3 torch_golden.py FOLDER THREADS

FOLDER holds `layer.safetensors`, the layer's inputs with weights as checkpoints have them, [out, in], and
`expected.safetensors`, what Assay computed from them. Then one line in, one line out:

    prepare FORM    ->  ready
    run FORM        ->  seconds 0.123456
    check FORM      ->  checked {"tensors": [{"name", "differ", "elements"}], "out": {"differ", "elements"}}
    capture FORM    ->  captured PATH

`check` forces Assay's BF16 activations into each row quantization, and Assay's codes into each product, and counts
INT8 codes and INT32 sums that differ. `out` compares the free-running layer's output, which need not be equal: its
FP32 sums have another order. `capture` writes the tensors of a free-running layer as a bundle holds them
(docs/bundles.md, captures.safetensors), so that Assay can judge this golden as it judges a device. The first line printed is `torch VERSION threads N`, or `absent REASON`.
"""

import json
import mmap
import os
import struct
import sys
import time

try:
    import torch
    import torch.nn.functional as F
except Exception as error:  # a broken installation fails in more ways than ImportError
    print("absent", " ".join(f"{type(error).__name__}: {error}".split()), flush=True)
    sys.exit(0)

PAGE, TILE, BATCH = 128, 16, 16
FORMS = ("f32_held", "converted", "int_mm")
# Projection -> the quantized activation it multiplies.
PROJECTIONS = {
    "wq": "normed_i8",
    "wk": "normed_i8",
    "wv": "normed_i8",
    "wo": "attn_out_i8",
    "w_gate": "mlp_norm_i8",
    "w_up": "mlp_norm_i8",
}
# Quantized activation -> the BF16 tensor it is made of.
QUANTIZED = {"normed_i8": "normed_states", "attn_out_i8": "attn_out", "mlp_norm_i8": "mlp_norm_in"}


def load(path):
    """The tensors of a safetensors file, as views of its mapping."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    types = {"BF16": torch.bfloat16, "F32": torch.float32, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            dtype = types[entry["dtype"]]
            count = (end - start) // dtype.itemsize
            flat = torch.frombuffer(data, dtype=dtype, count=count, offset=8 + length + start)
            tensors[name] = flat.view(entry["shape"])
    return tensors


def save(path, tensors):
    """Writes a safetensors file."""
    types = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int8: "I8", torch.int64: "I64"}
    header, data = {}, []
    end = 0
    for name, tensor in tensors.items():
        data.append(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        start, end = end, end + len(data[-1])
        header[name] = {"dtype": types[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + b"".join(data))


def narrow(x):
    """Rounded to BF16 (ties to even) and widened again."""
    return x.to(torch.bfloat16).float()


def quantize(x):
    """Row quantization: INT8 codes and scales. Tensors are divided: torch computes `127 / x` as `127 * (1 / x)`."""
    amax = x.abs().amax(1, keepdim=True).clamp_min(1e-4)
    most = torch.full_like(amax, 127.0)
    return torch.round(x * (most / amax)).clamp(-127, 127).to(torch.int8), amax / most


def inverse_rms(x, eps):
    return 1.0 / torch.sqrt((x * x).sum(-1, keepdim=True) * (1.0 / x.shape[-1]) + eps)


class Layer:
    """The layer with its products done in one form."""

    def __init__(self, tensors, form):
        self.t, self.form = tensors, form
        self.eps = tensors["rms_norm_eps"].item()
        self.active = int(tensors["active_batch"].item())
        self.dim = tensors["q_norm_weight"].shape[0]
        self.kv_heads = tensors["wk"].shape[0] // self.dim
        self.group = tensors["wq"].shape[0] // self.dim // self.kv_heads
        # Loading, not timed: the down weight is BF16, which the loader makes of codes and scales where it is not held
        # so; this step writes into caches of its own.
        down = tensors["w_down"]
        if down.dtype == torch.int8:
            down = (down.float() * tensors["w_down_scale"][:, None]).to(torch.bfloat16)
        self.down = down.float() if form == "f32_held" else down
        self.weights = {name: tensors[name].float() if form == "f32_held" else tensors[name] for name in PROJECTIONS}
        self.k_cache, self.v_cache = tensors["k_cache"].clone(), tensors["v_cache"].clone()

    def sums(self, name, codes):
        """The sums of an INT8 product; float32 holds them exactly below 2^24."""
        weight = self.weights[name]
        if self.form == "int_mm":
            return torch._int_mm(codes, weight.t())
        return F.linear(codes.float(), weight.float())

    def project(self, name, codes, scales):
        return self.sums(name, codes).float() * self.t[name + "_scale"] * scales

    def head_norm(self, projected, inv_rms, gamma):
        z = (projected * inv_rms).view(BATCH, -1, self.dim)
        return z * gamma * inverse_rms(z, self.eps)

    def rope(self, x):
        position = self.t["seq_lens"] - 1
        cos, sin = self.t["rope_cos"][position][:, None], self.t["rope_sin"][position][:, None]
        lo, hi = x.chunk(2, -1)
        (cos_lo, cos_hi), (sin_lo, sin_hi) = cos.chunk(2, -1), sin.chunk(2, -1)
        return torch.cat([lo * cos_lo - hi * sin_lo, hi * cos_hi + lo * sin_hi], -1)

    def cache_rows(self, slots):
        """Cache rows of slots for every KV head, [slots..., KV]."""
        heads = torch.arange(self.kv_heads)
        return (slots[..., None] // PAGE * self.kv_heads + heads) * PAGE + slots[..., None] % PAGE

    def attention(self, q, k, v):
        active, heads, group, dim = self.active, self.kv_heads, self.group, self.dim
        rows = self.cache_rows(self.t["slots"])
        # In reverse, so that of rows with one slot the first stays: padding repeats row 0.
        for b in reversed(range(BATCH)):
            self.k_cache[rows[b]], self.v_cache[rows[b]] = k[b].to(torch.bfloat16), v[b].to(torch.bfloat16)

        lengths = self.t["seq_lens"][:active]
        tiles = -(-int(lengths.max()) // TILE)
        positions = torch.arange(tiles * TILE)
        slots = self.t["block_table"][:active, positions // PAGE] * PAGE + positions % PAGE
        slots = slots.where(positions < lengths[:, None], 0)
        rows = self.cache_rows(slots).transpose(1, 2)  # [active, KV, tokens]
        keys, values = self.k_cache[rows].float(), self.v_cache[rows].float()

        scores = narrow(q[:active].view(active, heads, group, dim)) @ keys.transpose(2, 3) * dim**-0.5
        beyond = (positions >= lengths[:, None])[:, None, None]
        scores = scores.masked_fill(beyond, torch.finfo(torch.float32).min).unflatten(-1, (tiles, TILE))
        tile_max = scores.amax(-1)
        probs = narrow(torch.exp(scores - tile_max[..., None]))
        tile_sum = probs.sum(-1)
        tile_out = probs.transpose(2, 3) @ values.unflatten(2, (tiles, TILE))  # [active, KV, tiles, group, D]
        most, total, out = tile_max[..., 0], tile_sum[..., 0], tile_out[:, :, 0]
        for tile in range(1, tiles):
            new = torch.maximum(most, tile_max[..., tile])
            old, this = torch.exp(most - new), torch.exp(tile_max[..., tile] - new)
            total = old * total + this * tile_sum[..., tile]
            out = out * old[..., None] + tile_out[:, :, tile] * this[..., None]
            most = new
        attn = narrow(out / total[..., None]).reshape(active, -1)
        return torch.cat([attn, attn[:1].expand(BATCH - active, -1)])

    def run(self, keep=lambda **tensors: None):
        """One step; the BF16 output. `keep` is shown what the steps give."""
        t = self.t
        x = t["hidden_states"].float()
        inv_rms = inverse_rms(x, self.eps)
        normed = narrow(x * t["input_rms_weight"])
        codes, scales = quantize(normed)
        q_proj, k_proj, v_proj = (self.project(name, codes, scales) for name in ("wq", "wk", "wv"))
        q, k = (
            self.head_norm(projected, inv_rms, t[gamma])
            for projected, gamma in ((q_proj, "q_norm_weight"), (k_proj, "k_norm_weight"))
        )
        v = (v_proj * inv_rms).view(BATCH, -1, self.dim)
        keep(normed_states=normed, inv_rms_states=inv_rms, normed_i8=codes, act_scales=scales)
        keep(q_proj=q_proj, k_proj=k_proj, v_proj=v_proj, q_proj_norm=q, k_proj_norm=k, v_proj_norm=v)
        q = self.rope(q)
        attn = self.attention(q, self.rope(k), v)

        codes, scales = quantize(attn)
        keep(q=q, attn_out=attn, attn_out_i8=codes, attn_out_scales=scales)
        projected = self.project("wo", codes, scales)
        h1 = projected + x
        mlp_in = narrow(h1 * t["post_rms_weight"])
        codes, scales = quantize(mlp_in)
        post_inv = inverse_rms(h1, self.eps)
        keep(attn_proj_fp32=projected, post_norm_partial=h1, mlp_norm_in=mlp_in, inv_rms_tile=post_inv)
        gate, up = (self.project(name, codes, scales) for name in ("w_gate", "w_up"))
        keep(mlp_norm_i8=codes, mlp_act_scales=scales, gate_acc_all=gate, up_acc_all=up)
        gate, up = gate * post_inv, up * post_inv
        act = narrow(gate * (1.0 / (torch.exp(-gate) + 1.0)) * up)

        half = act.shape[1] // 2
        parts = [F.linear(act[:, part], self.down[:, part].float()) for part in (slice(half), slice(half, None))]
        down = parts[0] + parts[1]
        out = (narrow(down) + narrow(h1)).to(torch.bfloat16)
        keep(mlp_down_tile=act, down_acc_parts=torch.cat(parts), out=out)
        return out

    def capture(self):
        """A step's tensors as a bundle holds them."""
        kept = {}
        self.run(lambda **tensors: kept.update(tensors))
        stored = ("normed_states", "attn_out", "post_norm_partial", "mlp_norm_in", "mlp_down_tile")
        tensors = {name: kept[name].to(torch.bfloat16) if name in stored else kept[name] for name in kept if name != "q"}
        tensors["inv_rms_states"] = tensors["inv_rms_states"].flatten()
        for name in ("q_proj_norm", "k_proj_norm", "v_proj_norm"):
            tensors[name] = tensors[name].reshape(BATCH, -1)
        q = kept["q"].to(torch.bfloat16).view(BATCH * self.kv_heads, self.group, self.dim)
        tensors["all_q_padded"] = F.pad(q, (0, 0, 0, 16 - self.group)).reshape(-1, self.dim)
        for name, now in (("k", self.k_cache), ("v", self.v_cache)):
            changed = now.view(torch.int16) != self.t[name + "_cache"].view(torch.int16)
            rows = changed.any(1).nonzero().flatten()
            tensors[name + "_written_rows"], tensors[name + "_written_values"] = rows, now[rows]
        return tensors

    def check(self, expected):
        """Counts of INT8 codes and INT32 sums that differ from the expected ones, from the same inputs."""
        tensors = []

        def compare(name, found):
            differ = int((found != expected[name]).sum())
            tensors.append({"name": name, "differ": differ, "elements": found.numel()})

        for codes, source in QUANTIZED.items():
            compare(codes, quantize(expected[source].float())[0])
        for name, codes in PROJECTIONS.items():
            # A float32 sum that is not an integer below 2^31 must not pass for one.
            compare(name + "_sums", self.sums(name, expected[codes]).double())
        out = self.run()
        return {
            "tensors": tensors,
            "out": {"differ": int((out != expected["out"]).sum()), "elements": out.numel()},
        }


def main():
    folder, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    print("torch", torch.__version__, "threads", torch.get_num_threads(), flush=True)
    tensors = load(os.path.join(folder, "layer.safetensors"))
    expected = load(os.path.join(folder, "expected.safetensors"))
    layer = None
    for line in sys.stdin:
        command, form = line.split()
        if form not in FORMS:
            sys.exit(f"no form {form}; there are {', '.join(FORMS)}")
        if layer is None or layer.form != form:
            layer = None  # one form's weights at a time
            layer = Layer(tensors, form)
        if command == "prepare":
            answer = "ready"
        elif command == "run":
            start = time.perf_counter()
            layer.run()
            answer = f"seconds {time.perf_counter() - start:.9f}"
        elif command == "check":
            answer = "checked " + json.dumps(layer.check(expected))
        elif command == "capture":
            path = os.path.join(folder, "captures.safetensors")
            save(path, layer.capture())
            answer = "captured " + path
        else:
            sys.exit(f"no command {command}")
        print(answer, flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
