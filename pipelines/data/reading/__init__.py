"""From files of a raw log to rows with checked columns."""
