"""Sizes of a Parquet file's pages, which Arrow does not report, although it reads each into memory whole."""

from pathlib import Path

from lit_linformer.utils.errors import UserError

LARGEST_PAGE = 64_000_000  # bytes uncompressed; a dictionary page takes six times as much memory (pyarrow 26)
HEADER = 1 << 16  # bytes that hold the header of any page, since writers truncate the statistics in it
# Types of the fields in a page's header, in Thrift's compact protocol, where true and false are types themselves.
BOOLEANS, INTEGERS, BINARY, STRUCT = (1, 2), (4, 5, 6), 8, 12
UNPACKED, PACKED = 2, 3  # fields of PageHeader in parquet.thrift


def check_pages(path: Path, group, columns: list[str], setting: str) -> None:
    """Raises ValueError if a page of these columns is larger than LARGEST_PAGE.

    Only headers are read, and only of columns that are larger than that in this row group.

    Args:
        path: The file.
        group: pyarrow's RowGroupMetaData.
        columns: Names of the columns.
        setting: What error messages call the file's source.
    """
    for part in map(group.column, range(group.num_columns)):
        if part.path_in_schema.partition(".")[0] in columns and part.total_uncompressed_size > LARGEST_PAGE:
            if (largest := _largest(path, part)) > LARGEST_PAGE:
                raise UserError(
                    f"{setting}: {path}, column {part.path_in_schema} has a page of {largest / 1000000.0:.0f} MB, "
                    "which would be read at once",
                    f"pages of up to {LARGEST_PAGE // 1000000} MB (shorter cells, or use_dictionary=False and a "
                    "smaller data_page_size where the file is written)",
                )


def _largest(path: Path, part) -> int:
    """The uncompressed size in bytes of a column chunk's largest page."""
    place = part.dictionary_page_offset if part.has_dictionary_page else part.data_page_offset
    end, largest = place + part.total_compressed_size, 0
    with open(path, "rb") as file:
        while place < end:
            file.seek(place)
            header = _Header(file.read(HEADER))
            try:
                sizes = header.struct()
                largest = max(largest, sizes[UNPACKED])
                place += header.place + sizes[PACKED]
            except (IndexError, KeyError, RecursionError):  # a broken file, which Arrow reports when it reads it
                break
    return largest


class _Header:
    """Reads Thrift's compact protocol from bytes; `place` is the offset reached."""

    def __init__(self, data: bytes):
        self.data, self.place = data, 0

    def struct(self) -> dict[int, int]:
        """The integers among its fields; other fields are skipped."""
        numbers, field = {}, 0
        while kind := self._byte():
            field = field + (kind >> 4) if kind >> 4 else self._integer()
            if (kind := kind & 15) in INTEGERS:
                numbers[field] = self._integer()
            elif kind == BINARY:
                length = self._varint()  # first, since it moves place
                self.place += length
            elif kind == STRUCT:
                self.struct()
            elif kind not in BOOLEANS:
                raise KeyError(kind)
        return numbers

    def _byte(self) -> int:
        self.place += 1
        return self.data[self.place - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value, shift = value | (byte & 127) << shift, shift + 7
        return value | byte << shift

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
