"""Numbers as people and models write them, read as exact fractions.

Policy, where a reader could differ:
- Currency signs and codes, units and `%` are dropped: "$18" and "18 dollars" are 18, "25%" and "25 percent" are 25, as GSM8K writes its answers.
- Thousands: "1,234" and "1,234,567.8" (English), "1,23,456" (Indian), "1.234.567" and "1.234,56" (European), "1'234", "1_234", and groups of three
  parted by a no-break or thin space. A single point is a decimal point: "1.234" is 1 + 234/1000. A single comma is a decimal comma unless exactly
  three digits follow it and the number does not begin with 0: "12,5" is 12.5, "1,234" is 1234, "0,125" is 1/8. "1,2,3" is three numbers.
- Fractions: "3/4", mixed "1 3/4" and "1 and 3/4", "1¾", \\frac{3}{4}. "1/2/2020" and "3.5.2" are no fractions and no numbers.
- "1.5e3", "1.5 x 10^3", "1.5 × 10³" and "10^6" are read; "5k", "2 hundred", "3 thousand", "1.5 million", "billion" and "trillion" multiply. "dozen",
  "pair" and "score" are units (a question may ask for dozens); number words ("eighteen") are not read, and "2^3" is not worked out.
- A minus sign (also the Unicode minus and dashes) belongs to the number where it touches it, or follows "=", and nothing countable stands before it:
  "16-3" and "5–7" are two numbers, "= -3" is one. Digits that touch a letter before them ("x2", "A4") are names, not numbers.
- Decimals are exact: 0.333 is not 1/3. Numbers of more than 400 digits, exponents beyond 300 and zero denominators are not read.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

_MOST_DIGITS, _LARGEST_EXPONENT = 400, 300
_MULTIPLIERS = {"k": 10**3, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_THIN = "\u202f"
_SAME = {
    **dict.fromkeys("\u2212\ufe63\uff0d\u2010\u2011\u2012\u2013", "-"),  # minus, small and full-width hyphen-minus, hyphens, figure and en dash
    **dict.fromkeys("\u2044\u2215\uff0f", "/"),
    **dict.fromkeys("\u00a0\u2007\u2009", _THIN),
    "\uff0e": ".", "\u066b": ".", "\uff0c": ",", "\u066c": ",", "\uff05": "%", "\ufe6a": "%", "\uff04": "$", "\ufe69": "$", "\uff0b": "+",
    "\u2019": "'", "\uff1d": "=", "\u00d7": "*", "\u22c5": "*", "\u00b7": "*",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_LATEX = (
    (re.compile(r"\\[!;:]|\\left|\\right|\\displaystyle|\\bf\b"), ""),
    (re.compile(r"\\,|(?<=\d)~(?=\d)"), _THIN),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([$%#&_])"), r"\1"),
    (re.compile(r"\\(?:times|cdot)\b"), "*"),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"(?<=\d)\s*(?=\\[dt]?frac)"), " "),
    (re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac(\d)(\d)"), r"\1/\2"),
    (re.compile(r"\^\s*\{\s*([+-]?\d+)\s*\}"), r"^\1"),
)
_CURRENCY = r"(?:US\$|[$€£¥₹₽₩¢]|USD\s|EUR\s|GBP\s|INR\s|Rs\.?\s?)"
_BODY = rf"(?:\d(?:\d|[.,'_{_THIN}](?=\d))*|\.\d+)"
_NUMBER = re.compile(
    rf"(?<![A-Za-z\d.])(?P<sign>(?<![\w)\]%])[-+]|(?<==)\s*-\s+)?(?:{_CURRENCY}\s?(?P<inner>-)?)?"
    rf"(?P<body>{_BODY})"
    r"(?P<rest>"
    r"(?:e(?P<e>[+-]?\d{1,6})(?!\w))"
    r"|(?:\s*[x*]\s*10\s*\^\s*\(?(?P<ten>[+-]?\d{1,6}))"
    r"|(?:\^(?P<power>[+-]?\d{1,6}))"
    r"|(?:(?:\s+|\s+and\s+)(?P<numerator>\d+)/(?P<denominator>\d+)(?![\d/]|[.,]\d))"
    r"|(?:\s*/\s*(?P<over>\d+)(?![\d/]|[.,]\d))"
    r")?"
    r"(?:(?P<k>[kK])\b|\s*(?P<word>hundred|thousand|million|billion|trillion)s?\b)?",
    re.IGNORECASE,
)
_DATE = re.compile(r"\d+(?:/\d+){2,}")


@dataclass(frozen=True)
class Found:
    """A number in a text that `plain` has been applied to: its value and where it stands."""

    value: Fraction
    start: int
    end: int


def plain(text: str) -> str:
    """The text with digits, signs, spaces, vulgar fractions and LaTeX commands in one spelling."""
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    if not text.isascii():
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda match: "^" + match[0].translate(_SUPERSCRIPTS), text)
        text = "".join(map(_plain_character, text))
    text = re.sub(r"(?<=[A-Za-z)])\^[+-]?\d+", "", text)  # the exponent of a unit or a name: 25 m^2
    return re.sub(r"\.{2,}", " ... ", text)


def find_numbers(text: str) -> list[Found]:
    """Every number of a text after `plain`, from left to right."""
    matches = _NUMBER.finditer(_DATE.sub(lambda date: " " * len(date[0]), text))
    return [Found(value, match.start(), match.end()) for match in matches for value in _values(match)]


def parse_quantity(text: str) -> Fraction | None:
    """The one number that a text consists of, with its currency or unit; None where there is none, more than one, or words or operators around it."""
    text = plain(text)
    numbers = find_numbers(text)
    if len(numbers) != 1:
        return None
    before, after = text[: numbers[0].start], text[numbers[0].end :]
    if re.search(r"[^\W_]", before) or re.search(r"\d|[-+=^<>]\s*\w", after):
        return None
    return numbers[0].value


def _plain_character(character: str) -> str:
    if character in _SAME:
        return _SAME[character]
    if (decimal := unicodedata.decimal(character, None)) is not None:
        return str(decimal)
    kind, *parts = unicodedata.decomposition(character).split() or [""]
    if kind == "<fraction>" and len(parts) >= 3:
        return " " + "".join(chr(int(part, 16)) for part in parts).replace("\u2044", "/")
    return character


def _values(match: re.Match[str]) -> list[Fraction]:
    """The number, or numbers ("1,2,3"), of a match; none where it is not to be read."""
    body = match["body"]
    if len(body) > _MOST_DIGITS:
        return []
    numbers = _readings(body)
    if len(numbers) != 1:
        return numbers
    if match["denominator"] and int(match["numerator"]) >= int(match["denominator"]):
        return [*numbers, Fraction(int(match["numerator"]), int(match["denominator"]))] if int(match["denominator"]) else numbers
    value = _with_rest(numbers[0], match)
    if value is None:
        return []
    multiplier = "k" if match["k"] else (match["word"] or "").lower()
    value *= _MULTIPLIERS.get(multiplier, 1)
    return [-value if "-" in ((match["sign"] or "") + (match["inner"] or "")) else value]


def _with_rest(value: Fraction, match: re.Match[str]) -> Fraction | None:
    """The value with the exponent or fraction that follows it."""
    whole = match["body"].isdigit()
    exponent = match["e"] or match["ten"]
    if match["power"]:
        if match["body"] != "10":
            return value  # an expression such as 2^3, which is not worked out
        value, exponent = Fraction(1), match["power"]
    if exponent:
        return value * Fraction(10) ** int(exponent) if abs(int(exponent)) <= _LARGEST_EXPONENT else None
    if match["denominator"]:
        return value + Fraction(int(match["numerator"]), int(match["denominator"])) if whole and int(match["denominator"]) else None
    if match["over"]:
        return value / int(match["over"]) if int(match["over"]) else None
    return value


def _readings(body: str) -> list[Fraction]:
    """The numbers that digits with separators may be; see the policy above."""
    if re.fullmatch(r"\d+|\d*\.\d+", body):
        return [Fraction(body)]
    if re.fullmatch(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|[1-9]\d?(?:,\d{2})+,\d{3}(?:\.\d+)?", body):
        return [Fraction(body.replace(",", ""))]
    if re.fullmatch(r"[1-9]\d{0,2}(?:\.\d{3})+,\d+|[1-9]\d{0,2}(?:\.\d{3}){2,}", body):
        return [Fraction(body.replace(".", "").replace(",", "."))]
    if re.fullmatch(r"\d+,\d+", body):
        return [Fraction(body.replace(",", "."))]
    if re.fullmatch(rf"[1-9]\d{{0,2}}(?:(['_{_THIN}])\d{{3}})(?:\1\d{{3}})*(?:[.,]\d+)?", body):
        return [Fraction(re.sub(rf"['_{_THIN}]", "", body).replace(",", "."))]
    parts = re.split(rf"[,'_{_THIN}]", body)
    return [Fraction(part) for part in parts] if len(parts) > 1 and all(re.fullmatch(r"\d+|\d*\.\d+", part) for part in parts) else []
