def suggest(folder: str) -> str:
    raise NotImplementedError
