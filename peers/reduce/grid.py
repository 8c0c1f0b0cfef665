"""Which members exchange values in a reduction: all with all, or, in a large group, along the lines of a grid.

Members stand in columns, in the order of the group. The shares of a column's members, one after the other, are its
*piece* of the vector. For every other column a member has one *collector* there, usually the one in its own row.

    1. Each member sends its contribution to a piece to its collector in that column, which adds up what it collects.
    2. The collectors of a column send each other those sums, each to the owner of the share, which adds them up.
    3. The owner sends the finished average to its column, and each collector passes it on to those it collects from.

If all columns are of one length, every member moves as many bytes as with all others, 2 (N - 1) / N of the vector each
way, over about 2 sqrt(N) streams in place of N - 1; else some collectors move up to a fifth more. A grid with one
member a column is the reduction among all: every member is everybody's collector.
The arrangement is that of 2D-torus all-reduce (Mikami et al., arXiv 1811.05233).
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache

_MORE_LINES = 2
"""How many more columns and rows a grid may have than the fewest possible, if its columns are then of one length."""


class Grid:
    """Members are their indices in the group. Raises ValueError for a number of columns that is not `can_divide`d."""

    def __init__(self, num_members: int, num_columns: int) -> None:
        if not can_divide(num_members, num_columns):
            raise ValueError(f"{num_members} members do not stand in {num_columns} columns")
        self.num_members = num_members
        self.columns = tuple(
            range(num_members * column // num_columns, num_members * (column + 1) // num_columns)
            for column in range(num_columns)
        )

    @cached_property
    def _column_of(self) -> tuple[int, ...]:
        return tuple(number for number, column in enumerate(self.columns) for _ in column)

    @cached_property
    def _sources(self) -> list[list[int]]:
        sources: list[list[int]] = [[] for _ in range(self.num_members)]
        for member in range(self.num_members):
            for column in self.columns:
                if member not in column:
                    sources[self.collector(member, column)].append(member)
        return sources

    def column(self, member: int) -> range:
        """The members of this member's column."""
        return self.columns[self._column_of[member]]

    def are_mates(self, one: int, other: int) -> bool:
        """Whether two members stand in the same column."""
        return self._column_of[one] == self._column_of[other]

    def collector(self, member: int, column: range) -> int:
        """The member of this column to which `member` sends its contribution to the column's piece."""
        row = member - self.column(member).start
        if row < len(column):
            return column[row]
        # The column is shorter than the member's own: the members beyond its end divide themselves among its rows.
        return column[self._column_of[member] % len(column)]

    def sources(self, collector: int) -> tuple[int, ...]:
        """The members of other columns that send their contributions to this one, ascending."""
        return tuple(self._sources[collector])

    def mates(self, member: int) -> tuple[int, ...]:
        """The other members of this member's column, ascending."""
        return tuple(other for other in self.column(member) if other != member)

    def neighbours(self, member: int) -> tuple[int, ...]:
        """All members with which this one exchanges values, ascending."""
        collectors = {self.collector(member, column) for column in self.columns}
        return tuple(sorted({*collectors, *self.sources(member), *self.mates(member)} - {member}))


@lru_cache(maxsize=64)
def grid_of(num_members: int, num_columns: int) -> Grid:
    return Grid(num_members, num_columns)


def can_divide(num_members: int, num_columns: int) -> bool:
    """Whether so many members can stand in so many columns, such that every member collects from another one.

    Columns differ in length by one at most. If only one were longer, its last member would be alone in its row.
    """
    return num_columns == num_members or (1 < num_columns < num_members and num_members % num_columns != 1)


def best_grid(num_members: int) -> Grid:
    """Of the grids that are about square, the one whose busiest member has least to send."""
    squarest = math.isqrt(num_members)
    lines = {
        columns: columns + math.ceil(num_members / columns)
        for columns in range(max(2, squarest // 2), 2 * squarest + 2)
        if can_divide(num_members, columns)
    }
    fewest = min(lines.values())
    square = [columns for columns in lines if lines[columns] <= _MORE_LINES + fewest]
    return grid_of(
        num_members, min(square, key=lambda columns: (_most_sent(num_members, columns), lines[columns]))
    )


def _most_sent(num_members: int, num_columns: int) -> float:
    """What the busiest member sends, in lengths of the vector, if all pieces are equal."""
    rows, num_longer = divmod(num_members, num_columns)
    piece, num_mates = 1 / num_columns, rows - 1
    # The last members of the longer columns divide themselves among the rows of each shorter one.
    num_sources = num_columns - 1 + math.ceil(num_longer / rows)
    return round((1 - piece) + 2 * piece * num_mates / rows + piece * num_sources, 9)
