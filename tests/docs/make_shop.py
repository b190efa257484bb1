"""Write the log of the example in docs/search.md into the folder `shop`.

    mkdir shop && python tests/docs/make_shop.py

Clicks depend on a score of the search engine, on prices that change every third day,
and on the city, which prefers one of four kinds of articles.
"""

import sys

import numpy as np
import polars as pl

HOUR_MS = 3_600_000
BEGIN_MS = 1_700_000_000_000
WORDS = [f"word{i}" for i in range(12)]
CITIES = ["Bergen", "Cusco", "Lagos", "Osaka"]
USERS, ARTICLES, DAYS, RESULTS = 250, 120, 60, 6


def write_shop(folder: str, searches: int = 4000) -> None:
    """Write searches.csv, prices.csv and articles.csv."""
    rng = np.random.default_rng(7)
    price_days = range(0, DAYS, 3)
    article = np.tile(np.arange(ARTICLES), len(price_days))
    day = np.repeat(np.array(price_days), ARTICLES)
    is_reduced = rng.random(len(day)) < 0.3
    reduced_on = {
        (int(day[i]), int(article[i])): bool(is_reduced[i]) for i in range(len(day))
    }
    rows = []
    for search in range(searches):
        user = search % USERS
        query, city = int(rng.integers(12)), int(rng.integers(4))
        hour = search // USERS * 90 + int(rng.integers(1, 80))
        time = BEGIN_MS + hour * HOUR_MS + user
        results = rng.choice(ARTICLES, RESULTS, replace=False)
        score = np.where(results % 12 == query, 4, 0) + rng.gamma(2.0, 1.0, RESULTS)
        price_day = (time - BEGIN_MS - 1) // (72 * HOUR_MS) * 3
        reduced = np.array([reduced_on[price_day, int(i)] for i in results])
        is_preferred = results // 12 % 4 == city
        logit = 0.6 * score + 1.5 * reduced + 1.5 * is_preferred - 4
        clicked = rng.random(RESULTS) < 1 / (1 + np.exp(-logit))
        rows.append(
            {
                "user": f"u{user}",
                "search": f"s{search}",
                "query": WORDS[query],
                "city": CITIES[city],
                "at": time,
                "articles": " ".join(f"a{i}" for i in results),
                "bm25": " ".join(f"{value:.2f}" for value in score),
                "clicked": " ".join(f"a{i}" for i in results[clicked]),
            }
        )
    prices = {
        "article": [f"a{i}" for i in article],
        "since": BEGIN_MS + day * 24 * HOUR_MS,
        "price": np.where(is_reduced, 5.0, 9.0),
    }
    articles = {
        "id": [f"a{i}" for i in range(ARTICLES)],
        "title": [f"{WORDS[i % 12]} kind{i // 12 % 4}" for i in range(ARTICLES)],
    }
    pl.DataFrame(rows).write_csv(f"{folder}/searches.csv")
    pl.DataFrame(prices).write_csv(f"{folder}/prices.csv")
    pl.DataFrame(articles).write_csv(f"{folder}/articles.csv")


if __name__ == "__main__":
    write_shop(*sys.argv[1:] or ["shop"])
