"""read_safetensors.py FOLDER [BYTES FILE...]: reads a checkpoint's tensors by the published format of safetensors alone
(eight bytes of length, JSON, offsets) and by Hugging Face's index of shards, or from the files that are named, and prints
a line for each: name, type, shape, bytes and CRC-32. Writes their contents to BYTES, in the order of the lines. Then does so
again by the package `safetensors`, the format's own reader, or says that it is not there.
"""

import json
import pathlib
import sys
import zlib

BITS = {"F32": 32, "BF16": 16, "U8": 8, "I64": 64}


def line(name, dtype, shape, data):
    return f"{name} {dtype} {','.join(map(str, shape))} {len(data)} {zlib.crc32(data):08x}"


def read_file(path):
    """Each tensor of a file, by name, as (dtype, shape, bytes); asserts what the format asks."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    assert length <= 100_000_000 and 8 + length <= len(whole), f"{path}: a header of {length} bytes"
    text = whole[8 : 8 + length]
    assert text.startswith(b"{") and text.rstrip(b" ").endswith(b"}"), f"{path}: the header is not padded with spaces"

    def no_key_twice(pairs):
        assert len({key for key, _ in pairs}) == len(pairs), f"{path}: a key twice"
        return dict(pairs)

    header = json.loads(text.decode("utf-8"), object_pairs_hook=no_key_twice)
    metadata = header.pop("__metadata__", {})
    assert all(isinstance(value, str) for value in metadata.values()), f"{path}: metadata that is no text"
    data = whole[8 + length :]
    tensors = {}
    end_of_last = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        assert begin == end_of_last, f"{path}: a hole or an overlap before {name}"
        elements = 1
        for each in entry["shape"]:
            elements *= each
        assert (end - begin) * 8 == elements * BITS[entry["dtype"]], f"{path}: {name} has another size"
        tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
        end_of_last = end
    assert end_of_last == len(data), f"{path}: it does not end where its tensors do"
    return tensors


def read_by_index(folder, read):
    index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
    files = {name: read(folder / name) for name in sorted(set(index["weight_map"].values()))}
    tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert sum(map(len, files.values())) == len(tensors), "the index does not name every tensor"
    assert sum(len(data) for _, _, data in tensors.values()) == index["metadata"]["total_size"], "another total size"
    return tensors


def read_all(folder, names, read):
    if not names:
        return read_by_index(folder, read)
    tensors = {}
    for name in names:
        more = read(folder / name)
        assert not tensors.keys() & more.keys(), f"{name}: a tensor that another file has"
        tensors.update(more)
    return tensors


def main():
    folder = pathlib.Path(sys.argv[1])
    names = sys.argv[3:]
    tensors = read_all(folder, names, read_file)
    lines = [line(name, *tensors[name]) for name in sorted(tensors)]
    print("\n".join(lines))
    if names:
        pathlib.Path(sys.argv[2]).write_bytes(b"".join(tensors[name][2] for name in sorted(tensors)))
    try:
        import safetensors
    except ImportError:
        print("# the package safetensors is not there")
        return

    def read_by_package(path):
        return {
            name: (info["dtype"], list(info["shape"]), bytes(info["data"]))
            for name, info in safetensors.deserialize(path.read_bytes())
        }

    again = read_all(folder, names, read_by_package)
    assert [line(name, *again[name]) for name in sorted(again)] == lines, "the package reads something else"
    print(f"# the same by safetensors {safetensors.__version__}")


main()
