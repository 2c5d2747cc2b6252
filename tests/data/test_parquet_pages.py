import random

import pyarrow
import pyarrow.parquet
import pytest

from lit_linformer.data import parquet_pages
from lit_linformer.data.pretraining.corpus import Corpus

TEXTS = [f"{i} " + "word " * (i % 50) for i in range(5_000)]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_headers_are_read_to_the_end_of_each_column(version, dictionary, compression, tmp_path):
    """The pages of a column follow each other and fill it; the largest is as large as the writer was told to make it."""
    table = pyarrow.table({"id": list(range(5_000)), "text": TEXTS, "more": [[{"a": text[:9]}] * 3 for text in TEXTS]})
    path = tmp_path / "a.parquet"
    options = {"use_dictionary": dictionary, "compression": compression, "data_page_version": version}
    options |= {"data_page_size": 20_000, "write_batch_size": 50, "write_page_checksum": True}
    pyarrow.parquet.write_table(table, path, row_group_size=3_000, **options)
    metadata = pyarrow.parquet.ParquetFile(path).metadata
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for part in map(group.column, range(group.num_columns)):
            start = part.dictionary_page_offset if part.has_dictionary_page else part.data_page_offset
            data, place, largest, pages = path.read_bytes(), start, 0, 0
            while place < start + part.total_compressed_size:
                header = parquet_pages._Header(data[place:])
                sizes = header.struct()
                place += header.place + sizes[parquet_pages.PACKED]
                largest, pages = max(largest, sizes[parquet_pages.UNPACKED]), pages + 1
            assert place == start + part.total_compressed_size
            assert parquet_pages._largest(path, part) == largest
            if part.path_in_schema == "text" and not dictionary:
                assert pages > 5 and 10_000 < largest < 40_000
    with open(path, "r+b") as file:  # pages of random bytes: Arrow reports them, and nothing hangs
        file.seek(4)
        file.write(random.Random(0).randbytes(30_000))
    parquet_pages._largest(path, pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(0))


def test_a_page_that_is_too_large_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_pages, "LARGEST_PAGE", 1_000_000)
    small, large = tmp_path / "a.parquet", tmp_path / "b.parquet"
    cells = ["small " * 100_000, "text"] * 4  # 600 kB in a page, 2.4 MB in all
    options = {"use_dictionary": False, "data_page_size": 1, "write_batch_size": 1}
    pyarrow.parquet.write_table(pyarrow.table({"text": cells}), small, **options)
    assert sum(1 for _ in Corpus(str(small), column="text")) == 8
    pyarrow.parquet.write_table(pyarrow.table({"text": ["large " * 200_000], "other": ["x"]}), large)
    with pytest.raises(ValueError, match=r"b.parquet, column text has a page of 1 MB.*; allowed: pages of up to 1 MB"):
        list(Corpus(str(large), column="text"))
    assert list(Corpus(str(large), column="other")) == ["x"]
