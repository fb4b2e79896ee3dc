r"""Whether two LaTeX answers mean the same.

latex2sympy (math-verify's parser) reads single expressions; lists, sets, intervals, matrices,
equations, units, percents, bases, times and words are compared as text, because the parser drops
or mixes up what tells them apart: 2t = 2, 52_8 = 52_9, 2(3) = 5, "2 3" = 5, 12:30 = 2/5. Numbers
are compared exactly, since math-verify takes any two numbers below 1e-15 for equal.
"""

import functools
import re
from collections.abc import Sequence
from contextlib import suppress

# Cost

MAX_LENGTH, MAX_DEPTH, MAX_DIGITS, MAX_EXPONENT = 1000, 20, 400, 9999

_COSTLY = re.compile(rf"\d{{{MAX_DIGITS + 1}}}|\^[\s{{(]*[-+]?\d{{5}}|\d{{5}}[\s)}}]*!|![\s)}}]*!")
_TOWER = re.compile(r"\^[\s{(]*(\d{1,4})[\s)}]*\^[\s{(]*(\d{1,4})")


def is_costly(text: str) -> bool:
    """Whether reading or evaluating may take long: length, nesting, digits, towers, factorials."""
    if len(text) > MAX_LENGTH or _COSTLY.search(text):
        return True
    if any(int(base) ** min(int(power), 20) > MAX_EXPONENT for base, power in _TOWER.findall(text)):
        return True
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest > MAX_DEPTH


# Spelling

_CHARACTERS = {
    "-": "\u2212\u2013",
    "/": "\u00f7",
    "'": "\u2019",
    " ": "\u00a0~",
    r"\times ": "\u00d7",
    r"\cdot ": "\u00b7",
    r"\pi ": "\u03c0",
    r"\theta ": "\u03b8",
    r"\infty ": "\u221e",
    r"\leq ": "\u2264",
    r"\geq ": "\u2265",
    r"\cup ": "\u222a",
    r"\in ": "\u2208",
    r"\pm ": "\u00b1",
    r"^\circ ": "\u00b0",
    "^2": "\u00b2",
    "^3": "\u00b3",
    r"\frac{1}{2}": "\u00bd",
}
_SYMBOLS = str.maketrans({c: latex for latex, cs in _CHARACTERS.items() for c in cs})
_ARGUMENT = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_TIDY = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # layout
        (r"(?<!\\)\\(?:left|right|middle|[bB]igg?[lr]?)(?![A-Za-z])\.?", ""),
        (r"(?<=\d)(?:\\[,!]|\{,\})\s*(?=\d{3})", ""),
        (r"(?<!\\)\\(?:[,;:! ]|(?:quad|qquad|displaystyle|textstyle|limits)(?![A-Za-z]))", " "),
        (r"^\$(?=[^$]*$)", r"\\$"),  # a lone dollar is money
        (r"(?<!\\)\$|(?<!\\)\\[()\[\]]", ""),
        (r"\\mathrm\{([eid])\}", r"\1"),
        (r"\\operatorname\{([a-z]+)\}", r"\\\1"),
        (r"\\(?:math(?:rm|bf|it|sf)|mbox|text(?:bf|it|rm|normal|sf))\s*\{", r"\\text{"),
        (r"\\text\{\s*\}", ""),
        (r"[(\[]?\\begin\{(?:array\}\{[lcr| ]*|matrix)\}", r"\\begin{matrix}"),
        (r"\\end\{(?:array|matrix)\}[)\]]?", r"\\end{matrix}"),
        # one spelling each
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\frac\s*(\d)\s*(?=\d|\{|[a-z])", r"\\frac{\1}"),
        (rf"\\frac\s*{_ARGUMENT}\s*(\d|[a-z])", r"\\frac{\1}{\2}"),
        (r"\u221a\s*(\d+)", r"\\sqrt{\1}"),
        (r"\u221a", r"\\sqrt "),
        (r"(?<![\\A-Za-z])(sqrt|pi|theta|infty|sin|cos|tan|ln|log|exp)(?![A-Za-z])", r"\\\1"),
        (r"(?<![\\A-Za-z])infinity(?![A-Za-z])", r"\\infty"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
        (r"\\log_(\d)\s*", r"\\log_{\1}"),
        (r"\\(?:leqslant|le)(?![A-Za-z])|<=|\\not>", r"\\leq "),
        (r"\\(?:geqslant|ge)(?![A-Za-z])|>=|\\not<", r"\\geq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:langle|lparen)(?![A-Za-z])", "("),
        (r"\\(?:rangle|rparen)(?![A-Za-z])", ")"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\mathbb\{R\}(?!\^)", r"(-\\infty,\\infty)"),
        (r"\^\{\s*\\(?:circ|degree)\s*\}|\^?\\degree(?![A-Za-z])", r"^\\circ "),
        (r"(?i)\\text\{\s*per\s?cent(?:age)?\s*\}|per\s?cent(?:age)?(?![a-z])|\\%", "%"),
        (r"(?i),?\s*(?:\\text\{\s*(?:and|or)\s*\}|(?<![a-z\\])(?:and|or)(?![a-z]))\s*", ","),
        (r"(?i)(?<=\d)\s*(?:\\text\{)?\s*([ap])\.?m\.?\s*\}?$", r"\\text{\1m}"),
        (r"\\\$\s*([\d.,]*\d)(?:\s*\\text\{\s*dollars?\s*\})?", r"\1\\text{dollar}"),
        (r"\*\*", "^"),
        # numbers
        (r"(?<=\d)[eE]([+-]?\d+)(?!\w)", r"\\times 10^{\1}"),
        (r"(?<![\w.^_}])(\d+)\s+(\d+)/(\d+)(?!\w)", r"(\1+\\frac{\2}{\3})"),
        (r"(?<![\w.^_}])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})"),
        # latex2sympy reads products of numbers without a sign as mixed numbers
        (r"(?<![\w.^_\\{])(\d+)\s*(?=\(|\\(?:binom|frac))", r"\1\\cdot "),
        (r"\)\s*(?=\(|\d|\\frac|\\binom)", r")\\cdot "),
        # and drops primes
        (r"([A-Za-z])('+)", r"\1_{prime\2}"),
        (r"(?<=[A-Za-z])\^\{?\\prime\s*\}?", "_{prime}"),
        # spaces that separate nothing
        (r"\s+", " "),
        (r"(?<!\w) | (?!\w)", ""),
    )
]
_THOUSANDS = re.compile(r"(?<![\w.,])\d{1,3}(?:[, ]\d{3})+(?![\d,])")


def tidy(text: str) -> str:
    """One spelling of what LaTeX lets people write in many ways."""
    text = " ".join(text.translate(_SYMBOLS).split())
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(" .,;:")


def _readings(text: str) -> list[str]:
    """The tidy text; and as 1,000 may be a number or a list, the text with the number too."""
    number = _THOUSANDS.sub(lambda match: re.sub("[, ]", "", match[0]), text)
    return list(dict.fromkeys((tidy(text), tidy(number))))


# Structure

_TOKEN = re.compile(r"\\begin\{\w+\}|\\end\{\w+\}|\\[A-Za-z]+|\\.|.", re.DOTALL)
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])\s*")
_MATRIX = re.compile(r"\\begin\{([pbB]?|small)matrix\}(.*)\\end\{\1matrix\}")
_NAME = re.compile(
    r"\\?[A-Za-z][A-Za-z\\ ]*(?:_(?:\w|\{[^{}]*\}))*(?:\([A-Za-z, ]+\))?"  # AB, m_{\max}, f(x)
    r"|\([a-z,]+\)|\\text\{[^{}]*\}"
)
_VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_\w|_\{\w+\})?")


def _depths(tokens: Sequence[str]) -> list[int]:
    depth, depths = 0, []
    for token in tokens:
        depth += token in ("(", "[", "{", r"\{") or token.startswith(r"\begin")
        depth -= token in (")", "]", "}", r"\}") or token.startswith(r"\end")
        depths.append(depth)
    return depths


def _split(text: str, *separators: str) -> list[str]:
    """Split at the separators that stand outside all brackets."""
    tokens, parts = _TOKEN.findall(text), [""]
    for token, depth in zip(tokens, _depths(tokens), strict=True):
        if depth == 0 and token in separators:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


def _items(text: str) -> tuple[str, list[str]]:
    r"""Brackets ("()", "[)", "\{\}" or "") and items of a tuple, interval, set or bare list."""
    tokens = _TOKEN.findall(text)
    brackets, inner = "", text
    if tokens and tokens[0] in ("(", "[", r"\{") and 0 not in _depths(tokens)[:-1]:
        brackets, inner = tokens[0] + tokens[-1], "".join(tokens[1:-1])
    items = _split(inner, ",", ";")
    if brackets == r"\{\}" or not brackets:
        # 1 \pm a is two items
        signs = ["+-" if _PLUS_MINUS.search(item) else "+" for item in items]
        items = [_PLUS_MINUS.sub(s, i) for i, both in zip(items, signs, strict=True) for s in both]
    elif len(items) == 1:
        return "", [text]
    return brackets, items


def _membership(text: str) -> tuple[str, str]:
    r"""`x \in S`, `x < 3` or `1 < x \leq 2` as variable and set; else "" and the text."""
    variable, *rest = _split(text, r"\in")
    if len(rest) == 1 and _NAME.fullmatch(variable):
        return variable, rest[0]
    signs = [token for token in _TOKEN.findall(text) if token in ("<", ">", r"\leq", r"\geq")]
    parts = _split(text, "<", ">", r"\leq", r"\geq")
    if signs and signs[0] in (">", r"\geq"):  # turn it around, so that it ascends
        signs = [{">": "<", r"\geq": r"\leq"}.get(sign, "") for sign in reversed(signs)]
        parts = parts[::-1]
    if len(parts) == 2 and _VARIABLE.fullmatch(parts[0]):
        signs, parts = ["<", *signs], [r"-\infty", *parts]
    elif len(parts) == 2:
        signs, parts = [*signs, "<"], [*parts, r"\infty"]
    if len(parts) != 3 or not set(signs) <= {"<", r"\leq"} or not _VARIABLE.fullmatch(parts[1]):
        return "", text
    left, right = ("[" if signs[0] == r"\leq" else "("), ("]" if signs[1] == r"\leq" else ")")
    return parts[1], f"{left}{parts[0]},{parts[2]}{right}"


# Units

_UNITS = {
    name: names.split()[0]
    for names in (
        *("mm millimeter millimetre", "cm centimeter centimetre", "m meter metre"),
        *("km kilometer kilometre", "in inch inche", "ft foot feet", "yd yard", "mi mile"),
        *("mg milligram", "g gram", "kg kilogram", "lb pound", "ml milliliter", "l liter litre"),
        *("s sec second", "min minute", "h hr hour", "day", "week", "month", "year yr", "am", "pm"),
        *("mph", "degree deg circ", "radian rad", "dollar", "cent", "hz hertz", "pa pascal"),
        *("people person", "way", "student", "unit", "square sq", "cubic cu", "/ per"),
    )
    for name in names.split()
}
_BARE_UNIT = "|".join(sorted((name for name in _UNITS if len(name) > 1), key=len, reverse=True))
_UNIT = re.compile(
    r"(?P<value>.*?(?:\d|\\pi)[)}%!]*) ?(?P<unit>(?:"
    r"\^\\circ ?[CF]?|\\text\{[^{}]*\}(?:\^(?:-?\d|\{-?\d\}))?"
    rf"|(?<![A-Za-z])(?:{_BARE_UNIT})s?(?![A-Za-z])(?:\^\{{?\d\}}?)?)+)"
)
_NO_UNIT = re.compile(
    r"(?i)\b(?:or|and|not|no|if|is|are|when|where|mod|more|less|most|least|than|for|all|any|except"
    r"|over|under|above|below|about|odd|even|but|to|base|wrong|false)\b"
)
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")  # 90^\circ is 90, but the sine of it is 1


def _unit(text: str) -> tuple[str, str]:
    r"""Value and unit: `5\text{ square cm}` is ("5", "cm 2"). No unit, or just units, is ""."""
    match = _UNIT.fullmatch(text)
    if not match or _NO_UNIT.search(match["unit"]) or _ANGLE.search(text):
        return text, ""
    words = re.findall(r"[a-z]+|-?\d|/", match["unit"].replace(r"\text", "").lower())
    singular = [word if word in _UNITS else word.removesuffix("s") for word in words]
    names = [_UNITS.get(word, word) for word in singular]
    for power, sign in (("square", "2"), ("cubic", "3")):
        if power in names:
            names = [*(name for name in names if name != power), sign]
    return match["value"].strip(), "" if names[:1] in (["unit"], ["2"]) else " ".join(names)


# Values


class Unreadable(ValueError):
    """The text has no meaning that an answer could be compared to."""


_REFUSED = re.compile(
    r"(?<![\\A-Za-z^_}])\d+\{|\d_|\d \d|mod(?![a-z])|\\pm|!!|(?:[A-Za-z]{2,} ){2}[A-Za-z]{2,}"
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")


def _repeating(match: re.Match) -> str:
    whole, head, cycle = match.groups()
    numerator = int(whole + head + cycle) - int(whole + head or "0")
    return rf"\frac{{{numerator}}}{{{'9' * len(cycle) + '0' * len(head)}}}"


@functools.lru_cache(maxsize=4096)
def _read(text: str):
    """The sympy object of a single expression, unevaluated."""
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    if re.fullmatch(r"[-+]?\d+(?:\.\d+)?", text):
        return sympy.Rational(text)
    if _REFUSED.search(text):
        raise Unreadable(text)
    text = _REPEATING.sub(_repeating, text)
    text = re.sub(r"(?<![A-Za-z\\])I(?![A-Za-z_])", "I_{0}", text)  # or it is the imaginary unit
    try:
        value = latex2sympy(
            text,
            is_real=True,
            convert_degrees=bool(_ANGLE.search(text)),
            normalization_config=NormalizationConfig(
                basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
            ),
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        # evaluated, the derivative of one letter by another would be 0
        symbols = {d: sympy.Symbol(str(d), real=True) for d in value.atoms(sympy.Derivative)}
        symbols[sympy.EulerGamma] = sympy.Symbol("gamma", real=True)
        if not value.has(sympy.Sum, sympy.Product):
            symbols[sympy.Symbol("i", real=True)] = sympy.I
        value = value.xreplace(symbols)
    except Exception as error:  # the parser raises Exception itself
        raise Unreadable(text) from error
    if value.has(sympy.nan, sympy.zoo):
        raise Unreadable(text)
    return value


def _exact(value):
    """Evaluated, with decimals as fractions: 0.1 is 1/10."""
    from sympy import Float, Rational

    value = value.doit()
    return value.xreplace({number: Rational(str(number)) for number in value.atoms(Float)})


def _vanishes(difference, tolerance=0) -> bool | None:
    """Whether a constant is 0, to 500 digits, or below the tolerance; None if it is no number."""
    parts = difference.evalf(20, maxn=500).as_real_imag()
    if not all(part.is_Number and part.is_finite for part in parts):
        return None
    # asked for 20 digits, evalf knows next to none of a zero that it cannot prove
    return all(0 < getattr(p, "_prec", 0) < 30 or abs(p) <= tolerance for p in parts)


def _same_value(gold, answer, decimal: bool = False) -> bool:
    """Equal exactly; or to six digits if one is a decimal and the other no finite one."""
    from math_verify import verify
    from sympy import Abs, Expr, Max, Min, Mod, Rational, ceiling, floor, primerange

    if gold == answer:
        return True
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return False
    gold, answer = _exact(gold), _exact(answer)
    difference = gold - answer
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not symbols:
        finite = all(value.is_Rational and 10**20 % value.q == 0 for value in (gold, answer))
        approximate = decimal and not finite  # 1/3 is 0.333333, but 2 is not 2.0000001
        size = max(abs(gold.evalf(20)), abs(answer.evalf(20))) if approximate else 0
        return bool(_vanishes(difference, min(1, size) * Rational(1000001, 10**12)))
    points = [
        dict(zip(symbols, (Rational(p, q) for p in primerange(17, 1000)), strict=False))
        for q in (7, -11, 29)
    ]
    vanishes = [_vanishes(difference.subs(point)) for point in points]
    if False in (vanishes[0], vanishes[2]):
        return False
    if all(vanishes) and not difference.has(Abs, Max, Min, Mod, ceiling, floor):
        return True
    return verify(gold, answer, numeric_precision=50, timeout_seconds=None)


def _same_expression(gold: str, answer: str) -> bool:
    value = _read(gold)
    if gold == answer:
        return True
    with suppress(Unreadable):
        return _same_value(value, _read(answer), bool(re.search(r"\.\d", gold + answer)))
    return False


# Answers


def _words(text: str) -> str:
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    return " ".join(re.sub(r"[(){}.,;:!\"$\\ ]+", " ", text).casefold().split())


def _without_percent(text: str) -> str:
    return rf"\frac{{{text[:-1]}}}{{100}}" if text.endswith("%") else text


def _same_single(gold: str, answer: str) -> bool:
    """Compare what is neither list nor equation: words, times, bases, percents, expressions."""
    (gold, gold_unit), (answer, answer_unit) = _unit(gold), _unit(answer)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False
    words, same_words = _words(gold), _words(gold) == _words(answer)
    if r"\text" in gold:
        if not 1 <= len(words.split()) <= 8:
            raise Unreadable(gold)
        return same_words
    if r"\text" in answer:
        return same_words
    if same_words and re.fullmatch(r"[a-z]{4,}|yes|no|odd", words):
        return True
    if re.fullmatch(r"\d?\d:\d\d", gold) or re.fullmatch(r"\d?\d:\d\d", answer):
        return gold.lstrip("0") == answer.lstrip("0")
    bases = [re.fullmatch(r"(\d[\dA-F]*)_\{?\(?(\d+)\)?\}?", text) for text in (gold, answer)]
    if bases[0]:
        return bases[0].groups() == bases[1].groups() if bases[1] else answer == bases[0][1]
    number, other = gold.removesuffix("%"), answer.removesuffix("%")
    if gold.endswith("%") == answer.endswith("%"):
        return _same_expression(number, other)
    # asked for a percentage, people write 50 for 50%; but 1/2 is not meant as 1/2%
    may_count = "%" in gold or re.fullmatch(r"[1-9]\d*(?:\.\d+)?", gold)
    if may_count and _same_expression(number, other):
        return True
    return _same_expression(*map(_without_percent, (gold, answer)))


def _same_equation(gold: list[str], answer: list[str]) -> bool:
    """Compare chains `a = b = c`. A value stands for the equation that names it: x = 5 and 5."""
    if len(gold) == 1 or len(answer) == 1:
        return same(gold[-1], answer[-1]) and all(
            _NAME.fullmatch(side) or same(side, chain[-1])
            for chain in (gold, answer)
            for side in chain[:-1]
        )
    if gold[0].replace(" ", "") == answer[0].replace(" ", "") and same(gold[-1], answer[-1]):
        return bool(_NAME.fullmatch(gold[0])) or gold[1:-1] == answer[1:-1]
    if len(gold) != 2 or len(answer) != 2:
        return False
    # proportional differences: y = 2x + 1 and 2x - y + 1 = 0
    gold_difference = _read(gold[0]) - _read(gold[1])
    try:
        difference = _read(answer[0]) - _read(answer[1])
    except Unreadable:
        return False
    symbols = sorted(gold_difference.free_symbols | difference.free_symbols, key=str)
    point = {symbol: 3 + 2 * index for index, symbol in enumerate(symbols)}
    scale, gold_scale = difference.subs(point), gold_difference.subs(point)
    if not symbols or _vanishes(scale) is not False or _vanishes(gold_scale) is not False:
        return False
    return _same_value(gold_difference * scale, difference * gold_scale)


def _same_unordered(gold: Sequence[str], answer: Sequence[str]) -> bool:
    left = list(answer)
    for item in gold:
        found = next((other for other in left if same(item, other)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def same(gold: str, answer: str) -> bool:
    """Whether two tidy texts mean the same. Raises Unreadable if the gold has no meaning."""
    (gold_name, gold), (answer_name, answer) = _membership(gold), _membership(answer)
    if gold_name and answer_name and gold_name != answer_name:
        return False
    matrices = _MATRIX.fullmatch(gold), _MATRIX.fullmatch(answer)
    if any(matrices):
        if not all(matrices):
            return False
        rows, answer_rows = (_split(m[2].removesuffix(r"\\"), r"\\") for m in matrices)
        pairs = [(_split(g, "&"), _split(a, "&")) for g, a in zip(rows, answer_rows, strict=False)]
        return len(rows) == len(answer_rows) and all(
            len(g) == len(a) and all(map(same, g, a)) for g, a in pairs
        )
    if len(_split(gold, ",", ";")) == len(_split(answer, ",", ";")) == 1:
        for separator, compare in (("=", _same_equation), (r"\cup", _same_unordered)):
            parts, answer_parts = _split(gold, separator), _split(answer, separator)
            if len(parts) > 1 or len(answer_parts) > 1:
                return compare(parts, answer_parts)
    (brackets, items), (answer_brackets, answer_items) = _items(gold), _items(answer)
    kinds = {brackets, answer_brackets}
    if len(items) != len(answer_items):
        return False
    if kinds != {""} or len(items) > 1:
        if kinds <= {"", r"\{\}"}:
            return _same_unordered(items, answer_items)
        return (len(kinds) == 1 or kinds == {"", "()"}) and all(map(same, items, answer_items))
    return _same_single(gold, answer)


@functools.lru_cache(maxsize=4096)
def _is_readable(gold: str) -> bool:
    try:
        return same(tidy(gold), tidy(gold))
    except Unreadable:
        return False


def _is_same(gold: str, answer: str) -> bool:
    try:
        return same(gold, answer)
    except Unreadable:
        return False


def judge(golds: Sequence[str], answers: Sequence[str]) -> bool | None:
    """Whether an answer is among the accepted ones; None if none of these can be read."""
    golds = [gold for gold in golds if _is_readable(gold)]
    texts = [text for answer in answers for text in _readings(answer)]
    if not golds:
        return None
    return any(_is_same(gold, t) for g in golds for gold in _readings(g) for t in texts)
