#!/usr/bin/env python3
"""Runs the Qwen3-14B A8W8 decode layer of the kernel library on the inputs of a case: a runner for `assay gate --run`.

    assay gate --run 'python qwen3_decode.py --library LIB --in {inputs} --out {outputs}' CASE

Not verified on hardware. README.md beside this file says how to run it; docs/commands.md is the protocol.

It needs torch and the kernel library. `--dry-run` does everything but the kernel and needs Python alone; `--selftest`
tries that on inputs of its own.
"""

import argparse
import ast
import json
import os
import struct
import sys
import tempfile
from pathlib import Path

ROWS = 16  # physical rows of a decode batch
MODULE = "models/qwen3/14b/decode_layer_a8w8.py"
ENTRY = "_decode_layer_test_entry"
OUTPUT = "out"
CACHES = ("k_cache", "v_cache")
# Parameters of the entry in its own order, for a dry run without the library.
PARAMETERS = (
    "hidden_states input_rms_weight wq wk wv wq_scale wk_scale wv_scale q_norm_weight k_norm_weight seq_lens "
    "active_batch block_table slot_mapping rope_cos rope_sin k_cache v_cache wo wo_scale w_gate w_up "
    "w_gate_scale w_up_scale w_down post_rms_weight out"
).split()
BYTES = {"BF16": 2, "F32": 4, "I8": 1, "I32": 4, "I64": 8}
# Constants of the library's module that its kernels are built for, each with what a case has in its place.
BUILT_FOR = {"HIDDEN": "hidden_size", "INTERMEDIATE": "intermediate_size", "HEAD_DIM": "head_dim",
             "NUM_KV_HEADS": "num_key_value_heads"}


class Refused(Exception):
    """What is asked for cannot be run; the text says why and what to do."""


def read_tensors(path):
    """Tensors of a safetensors file as {name: (dtype, shape, bytes)}, and its metadata."""
    data = Path(path).read_bytes()
    if len(data) < 8 or struct.unpack("<Q", data[:8])[0] > len(data) - 8:
        raise Refused(f"{path}: is no safetensors file, or is cut short")
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    body = memoryview(data)[8 + length:]
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        size = BYTES.get(entry["dtype"])
        for dimension in entry["shape"]:
            size = None if size is None else size * dimension
        if size != end - begin or end > len(body):
            raise Refused(f"{path}: {name}: {entry['dtype']} {entry['shape']} does not fit its {end - begin} bytes")
        tensors[name] = (entry["dtype"], entry["shape"], body[begin:end])
    return tensors, metadata


def write_tensors(path, tensors):
    """Writes {name: (dtype, shape, bytes)} as a safetensors file, whole or not at all."""
    order = sorted(tensors, key=lambda name: (-BYTES[tensors[name][0]], name))
    header, end = {}, 0
    for name in order:
        dtype, shape, data = tensors[name]
        begin, end = end, end + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = Path(path)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(tensors[name][2])
    os.replace(part, path)


def parameters(source, entry):
    """Names of the parameters of a function of the library, in order, read off its source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == entry:
            return [argument.arg for argument in node.args.posonlyargs + node.args.args]
    raise Refused(f"{entry}: the library's module has no such function; name another with --entry")


def arguments(names, inputs):
    """What the entry is called with: inputs by name, and `out`, filled with NaN so that what is not written shows."""
    missing = [name for name in names if name not in inputs and name != OUTPUT]
    if missing:
        hint = ""
        if any(name.endswith("_cache_scale") for name in missing):
            hint = "; this revision of the kernel has INT8 caches, take one whose caches are BF16"
        raise Refused(f"the entry takes {', '.join(missing)}, which the case has no tensor for{hint}")
    if OUTPUT not in names:
        raise Refused(f"the entry has no parameter `{OUTPUT}`; name another with --entry")
    unused = sorted(set(inputs) - set(names))
    if unused:
        # An older kernel knows no active batch and computes all rows, which is right for a full batch alone.
        print(f"the entry does not take: {', '.join(unused)}", file=sys.stderr)
    if "active_batch" in unused and struct.unpack("<i", bytes(inputs["active_batch"][2]))[0] != ROWS:
        raise Refused("the entry takes no active_batch; run a case with active_batch 16, or a later kernel")
    dtype, shape, _ = inputs["hidden_states"]
    count = shape[0] * shape[1]
    filled = dict(inputs)
    filled[OUTPUT] = (dtype, shape, struct.pack("<H", 0x7FC0) * count)
    return [(name, filled[name]) for name in names]


def run_kernel(options, module_path, called):
    """Calls the kernel; returns {name: bytes} of what it wrote."""
    import torch

    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
    # Copied, because the kernel writes into caches and output.
    tensors = {
        name: torch.frombuffer(bytearray(data), dtype=dtypes[dtype]).reshape(shape)
        for name, (dtype, shape, data) in called
    }
    # The library's modules import each other by their bare names, and its goldens from its root.
    sys.path[:0] = [str(module_path.parent), str(options.library)]
    module = __import__(module_path.stem)
    from pypto.backend import BackendType, set_backend_type
    from pypto.runtime import RunConfig

    for constant, size in BUILT_FOR.items():
        built, asked = getattr(module, constant, None), options.metadata.get(size)
        if built is not None and asked is not None and int(asked) != built:
            raise Refused(f"the kernel is built for {size} {built}, the case has {asked}; run a case of geometry 14b")
    backend = BackendType.Ascend950 if options.platform.startswith("a5") else BackendType.Ascend910B
    set_backend_type(backend)
    config = RunConfig(platform=options.platform, device_id=options.device, backend_type=backend)
    entry = getattr(module, options.entry)
    values = list(tensors.values())
    program = entry.compile(*values, config=config)
    # Some revisions have to mend generated code before it compiles for the cores.
    mend = getattr(module, "_patch_test_aicore_bitcast_helpers", None)
    if mend is not None:
        mend(program.output_dir)
    program(*values, config=config)
    return {name: tensors[name].contiguous().view(torch.uint8).numpy().tobytes() for name in (OUTPUT, *CACHES)}


def run(options):
    """Reads inputs, calls the kernel, writes outputs."""
    inputs, options.metadata = read_tensors(options.inputs)
    if options.metadata.get("kernel", "decode_layer") != "decode_layer":
        kernel = options.metadata["kernel"]
        raise Refused(f"{options.inputs}: is of kernel {kernel}; this runner runs decode_layer only")
    layers = options.metadata.get("layers", "1")
    if layers != "1":
        raise Refused(f"{options.inputs}: has {layers} layers; the entry runs one layer, make a case with 1")
    module_path = options.library / options.module if options.library else None
    names = parameters(module_path.read_text(), options.entry) if module_path else PARAMETERS
    called = arguments(names, inputs)
    if options.dry_run:
        for name, (dtype, shape, _) in called:
            print(f"{name}: {dtype} {shape}")
        given = {name: bytes(data) for name, (_, _, data) in called}
        wrote = {name: given[name] for name in (OUTPUT, *CACHES)}
        wrote[OUTPUT] = bytes(len(wrote[OUTPUT]))
    else:
        if module_path is None:
            raise Refused("--library: name the directory of the kernel library, or use --dry-run")
        # Read by the library when it is imported: the longest context that its tables have room for.
        os.environ.setdefault("PTO2_MANUAL_MAX_SEQ", options.metadata.get("max_seq", "4096"))
        wrote = run_kernel(options, module_path, called)
    kept = (OUTPUT,) if options.no_caches else (OUTPUT, *CACHES)
    shapes = {name: (dtype, shape) for name, (dtype, shape, _) in called}
    write_tensors(options.outputs, {name: (*shapes[name], wrote[name]) for name in kept})
    return 0


def selftest():
    """The dry run on inputs made here: names, order, sizes and both files."""
    rows, hidden = 8, 4
    shapes = {"hidden_states": ("BF16", [ROWS, hidden]), "k_cache": ("BF16", [rows, 2]), "v_cache": ("BF16", [rows, 2]),
              "wq": ("I8", [hidden, hidden]), "active_batch": ("I32", [1]), "seq_lens": ("I32", [ROWS])}
    inputs = {}
    for name in PARAMETERS:
        dtype, shape = shapes.get(name, ("F32", [1, 3]))
        count = BYTES[dtype]
        for dimension in shape:
            count *= dimension
        inputs[name] = (dtype, shape, bytes((len(name) + i) % 251 for i in range(count)))
    del inputs[OUTPUT]
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "inputs.safetensors"), Path(folder, "captures.safetensors")
        write_tensors(given, inputs)
        read, _ = read_tensors(given)
        assert {name: (d, list(s), bytes(b)) for name, (d, s, b) in read.items()} == inputs, "inputs come back"
        options = parser().parse_args(["--in", str(given), "--out", str(made), "--dry-run"])
        assert run(options) == 0
        outputs, _ = read_tensors(made)
        assert sorted(outputs) == ["k_cache", OUTPUT, "v_cache"], "outputs have their names"
        assert bytes(outputs["k_cache"][2]) == inputs["k_cache"][2], "a dry run writes no cache row"
        assert list(outputs[OUTPUT][1]) == [ROWS, hidden], "the output has the shape of the hidden states"
        assert [name for name, _ in arguments(PARAMETERS, read)] == PARAMETERS, "arguments are in the entry's order"
        cut = given.read_bytes()
        given.write_bytes(cut[:-1])
        for refused in (lambda: read_tensors(given), lambda: arguments([*PARAMETERS, "k_cache_scale"], read),
                        lambda: arguments([n for n in PARAMETERS if n != "active_batch"], read),
                        lambda: parameters("def f(a): pass", ENTRY)):
            try:
                refused()
            except Refused:
                continue
            raise AssertionError("what cannot be run has to be refused")
        source = f"@jit\ndef {ENTRY}(a: int, b, c):\n    return a\n"
        assert parameters(source, ENTRY) == ["a", "b", "c"], "parameters are read off the source"
    print("selftest: all well (no kernel was run)")
    return 0


def parser():
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--in", dest="inputs", type=Path, help="safetensors file with the inputs of a case")
    cli.add_argument("--out", dest="outputs", type=Path, help="safetensors file to write")
    cli.add_argument("--library", type=Path, help="directory of the kernel library")
    cli.add_argument("--module", default=MODULE, help=f"its module with the kernel (default {MODULE})")
    cli.add_argument("--entry", default=ENTRY, help=f"the kernel in it (default {ENTRY})")
    cli.add_argument("-p", "--platform", default="a2a3", help="platform of the runtime (default a2a3)")
    cli.add_argument("-d", "--device", type=int, default=0, help="device to run on (default 0)")
    cli.add_argument("--no-caches", action="store_true", help="leave the caches out of the outputs")
    cli.add_argument("--dry-run", action="store_true", help="do everything but the kernel: out is zero, caches stay")
    cli.add_argument("--selftest", action="store_true", help="try the dry run on inputs made here")
    return cli


def main():
    options = parser().parse_args()
    if options.selftest:
        return selftest()
    if options.inputs is None or options.outputs is None:
        raise Refused("--in and --out: name both files")
    return run(options)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Refused, OSError) as error:
        sys.exit(f"error: {error}")
