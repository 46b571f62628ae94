"""The database of a small shop, made up here and the same on every run."""

from __future__ import annotations

import random
import sqlite3

SCHEMA = {
    "customers": "customers(id INTEGER PRIMARY KEY, name TEXT, city TEXT, since INTEGER)",
    "products": "products(id INTEGER PRIMARY KEY, name TEXT, category TEXT, price REAL)",
    "orders": "orders(id INTEGER PRIMARY KEY, customer_id INTEGER, product_id INTEGER, quantity INTEGER, placed TEXT)",
    "returns": "returns(id INTEGER PRIMARY KEY, order_id INTEGER, reason TEXT)",
}
CITIES = ("Rome", "Oslo", "Lima", "Kyoto")
PRODUCTS = (("lamp", "home"), ("kettle", "kitchen"), ("chair", "home"), ("knife", "kitchen"), ("rope", "garden"))
REASONS = ("broken", "late", "too small")
MOST_ROWS = 20


def open_shop() -> sqlite3.Connection:
    """The database, in memory and read-only: no statement that a model writes can change it."""
    chance = random.Random(7)
    shop = sqlite3.connect(":memory:", check_same_thread=False)
    for table in SCHEMA.values():
        shop.execute(f"CREATE TABLE {table}")
    people = [(number, f"customer {number}", chance.choice(CITIES), 2015 + number % 9) for number in range(1, 41)]
    goods = [(number, *product, 5.0 + 7 * number) for number, product in enumerate(PRODUCTS, 1)]
    orders = [
        (number, chance.randint(1, 40), chance.randint(1, 5), chance.randint(1, 4), f"2025-{number % 12 + 1:02}-15")
        for number in range(1, 201)
    ]
    returned = [(number, number * 9, chance.choice(REASONS)) for number in range(1, 21)]
    for table, rows in zip(SCHEMA, (people, goods, orders, returned), strict=True):
        shop.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
    shop.commit()
    shop.execute("PRAGMA query_only = on")
    return shop


def run_query(shop: sqlite3.Connection, query: str) -> str:
    """The first rows that `query` finds, one a line. Raises `sqlite3.Error` for one that fails, or runs too long."""
    steps = iter(range(1000))
    shop.set_progress_handler(lambda: next(steps, None) is None, 10_000)  # a query may not run for ever
    cursor = shop.execute(query)
    rows = cursor.fetchmany(MOST_ROWS)
    heads = [column[0] for column in cursor.description or ()]
    return "\n".join(", ".join(map(str, row)) for row in [heads, *rows])
