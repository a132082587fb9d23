"""All families of problems, by name."""

from outpace.tasks.arithmetic import add, compare, multiply, subtract
from outpace.tasks.code import edit, execute
from outpace.tasks.documents import documents
from outpace.tasks.functions import functions
from outpace.tasks.lists import lists
from outpace.tasks.lookups import needle, tables
from outpace.tasks.measures import dates, units
from outpace.tasks.problem import Family
from outpace.tasks.stories import stories
from outpace.tasks.strings import strings
from outpace.tasks.talk import talk

FAMILIES = {
    "addition": Family(make=add, sizes=(1, 8), longer=10),
    "subtraction": Family(make=subtract, sizes=(1, 8), longer=10),
    "multiplication": Family(make=multiply, sizes=(1, 5), longer=7),
    "comparison": Family(make=compare, sizes=(2, 8), longer=10),
    "lists": Family(make=lists, sizes=(3, 12), longer=16),
    "strings": Family(make=strings, sizes=(4, 12), longer=16),
    "json": Family(make=documents, sizes=(3, 8), longer=12),
    "code edits": Family(make=edit, sizes=(2, 8), longer=12),
    "programs": Family(make=execute, sizes=(2, 8), longer=12),
    "stories": Family(make=stories, sizes=(2, 6), longer=8),
    "dates": Family(make=dates, sizes=(1, 5), longer=8),
    "units": Family(make=units, sizes=(1, 6), longer=9),
    "tables": Family(make=tables, sizes=(4, 14), longer=18),
    "needles": Family(make=needle, sizes=(10, 400), longer=500),
    "functions": Family(make=functions, sizes=(1, 4), longer=5),
    "talk": Family(make=talk, sizes=(1, 6), longer=9),
}
