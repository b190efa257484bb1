"""Small logs in the layouts of H&M, MovieLens-1M and MIND, of random draws: nothing in
them is of the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl

COLOURS = ("Black", "Dark Blue", "White", "Light Pink")
GARMENTS = ("Trousers", "Vest top", "Sweater", "Dress", "Bra")


def hm(
    folder: Path,
    customers: int = 60,
    sold: int = 30,
    unsold: int = 20,
    rows: int = 1500,
) -> Path:
    """Half a year of purchases by day; some come twice on a day, and `unsold` articles
    never.
    """
    folder.mkdir()
    draw = np.random.default_rng(1)
    names = [f"{draw.integers(2**63):016x}{number:048x}" for number in range(customers)]
    articles = [f"{108775015 + 7 * number:010d}" for number in range(sold + unsold)]
    days = np.sort(draw.integers(0, 180, rows))
    taste = draw.integers(0, len(GARMENTS), customers)
    customer = draw.integers(0, customers, rows)
    article = np.where(
        draw.random(rows) < 0.7,
        taste[customer] + 5 * draw.integers(0, sold // 5, rows),
        draw.integers(0, sold, rows),
    )
    log = pl.DataFrame(
        {
            "t_dat": [
                (datetime(2018, 9, 20) + timedelta(days=int(day))).strftime("%Y-%m-%d")
                for day in days
            ],
            "customer_id": [names[number] for number in customer],
            "article_id": [articles[number] for number in article],
            "price": draw.random(rows) / 20,
            "sales_channel_id": draw.integers(1, 3, rows),
        }
    )
    pl.concat([log, log.head(30)]).sort("t_dat", maintain_order=True).write_csv(
        folder / "transactions_train.csv"
    )
    number = np.arange(sold + unsold)
    pl.DataFrame(
        {
            "article_id": articles,
            "product_code": [article[:7] for article in articles],
            "prod_name": [f"{GARMENTS[n % 5]} no {n // 5}" for n in number],
            "product_type_no": number % 5,
            "product_type_name": [GARMENTS[n % 5] for n in number],
            "product_group_name": [
                f"Garment {'Upper' if n % 5 else 'Lower'} body" for n in number
            ],
            "graphical_appearance_name": [
                "Solid" if n % 3 else "Stripe" for n in number
            ],
            "colour_group_name": [COLOURS[n % 4] for n in number],
            "section_name": [f"Womens {n % 2}" for n in number],
            "garment_group_name": [f"Jersey {n % 3}" for n in number],
            "detail_desc": [
                None
                if n == 3
                else f'{GARMENTS[n % 5]} in soft, "washed" jersey\nwith a pocket {n}.'
                for n in number
            ],
        }
    ).write_csv(folder / "articles.csv")
    pl.DataFrame(
        {
            "customer_id": names,
            "FN": [1.0 if n % 2 else None for n in range(customers)],
            "club_member_status": [
                "ACTIVE" if n % 3 else "PRE-CREATE" for n in range(customers)
            ],
            "fashion_news_frequency": [
                "NONE" if n % 2 else "Regularly" for n in range(customers)
            ],
            "age": [None if n == 5 else 20 + n % 50 for n in range(customers)],
        }
    ).write_csv(folder / "customers.csv")
    return folder


def movielens_1m(
    folder: Path, users: int = 40, movies: int = 40, rows: int = 1200
) -> Path:
    """Ratings by the second between `::`, with titles in Latin-1."""
    folder.mkdir()
    draw = np.random.default_rng(2)
    user, movie = draw.integers(1, users + 1, rows), draw.integers(1, movies + 1, rows)
    pairs = sorted(set(zip(user.tolist(), movie.tolist(), strict=True)))
    lines = [
        f"{u}::{m}::{draw.integers(1, 6)}::{978_300_000 + int(draw.integers(10**7))}\n"
        for u, m in pairs
    ]
    (folder / "ratings.dat").write_text("".join(lines))
    titles = [
        f"{m}::Les Misérables: Part {m} ({1950 + m})::Drama|Musical\n"
        for m in range(1, movies)
    ]
    titles.append(f'{movies}::Untitled "No Year"::Comedy\n')
    (folder / "movies.dat").write_bytes("".join(titles).encode("latin-1"))
    (folder / "users.dat").write_text(
        "".join(
            f"{u}::{'FM'[u % 2]}::{18 + u % 5}::{u % 21}::{48000 + u}\n"
            for u in range(1, users + 1)
        )
    )
    return folder


def mind(folder: Path, users: int = 40, news: int = 60, rows: int = 400) -> Path:
    """Shown news with a click glued to each, and what a user clicked before; without
    header lines.
    """
    folder.mkdir()
    draw = np.random.default_rng(3)
    past = [
        [f"N{n}" for n in draw.integers(0, news // 2, draw.integers(0, 6))]
        for _ in range(users)
    ]
    seconds = np.sort(draw.integers(0, 7 * 86_400, rows))
    for part, some in {
        "MINDsmall_train": slice(0, rows * 3 // 4),
        "MINDsmall_dev": slice(rows * 3 // 4, rows),
    }.items():
        (folder / part).mkdir()
        lines = []
        for number, second in enumerate(seconds[some], 1):
            user = int(draw.integers(users))
            shown = draw.choice(news * 3 // 4, 4, replace=False)
            clicks = [f"N{n}-{int(place == 1)}" for place, n in enumerate(shown)]
            moment = datetime(2019, 11, 9) + timedelta(seconds=int(second))
            hour = (moment.hour - 1) % 12 + 1
            written = f"{moment:%m/%d/%Y} {hour}:{moment:%M:%S %p}"
            lines.append(
                f"{number}\tU{user}\t{written}\t{' '.join(past[user])}\t{' '.join(clicks)}\n"
            )
        (folder / part / "behaviors.tsv").write_text("".join(lines))
        told = [
            (
                f"N{n}",
                ("sports", "news")[n % 2],
                f"kind{n % 4}",
                f'The "story of {n}',
                "" if n % 7 else "What happened",
            )
            for n in range(news)
        ]
        rest = "https://x\t[]\t[]\n"
        (folder / part / "news.tsv").write_text(
            "".join("\t".join((*each, rest)) for each in told)
        )
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "hm": hm,
    "movielens_1m": movielens_1m,
    "mind": mind,
}
