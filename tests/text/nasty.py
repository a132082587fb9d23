"""Texts that tokenizers disagree about: contractions, digits, spaces, scripts, marks, signs, code."""

CASES = (
    "\u00c4pfel \u00c4PFEL \u00e4pfel stra\u00dfe STRASSE \u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2 "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u041c\u0418\u0420"
)
MARKS = "e\u0301te\u0301 a\u0308 n\u0303 A\u030a \u1e9b\u0323"
INDIC = "\u0939\u093f\u0928\u094d\u0926\u0940 \u05e2\u05d1\u05e8\u05d9\u05ea"
SEPARATORS = "nbsp\u00a0x ideographic\u3000x zero\u200bwidth line\u2028sep next\u0085line bom\ufeff"
QUOTES = "x = 'self' + r'test' + b'\\x00' + u'mm' + f'{d}'  # don't"
TEXTS = [
    "",
    " ",
    "\n",
    "\t\t",
    " \n \n\n \r\n\r\n \t \n   \n    x",
    "it's we're I'LL don't 'twas 'til 'Re 'VE 'S'T o'clock 'DAMN",
    QUOTES,
    "'s 't 'm 'd 'll 're 've 'ss 'tt",
    "1 12 123 1234 12345 123456 1234567 3.14159 0xFF 1_000_000 1,234.5",
    "a1b22c333d4444",
    "\u0661\u0662\u0663\u0664 \u0967\u0968 \u00bd\u00b2\u2163 \u4e00\u4e8c\u4e09",
    "a   1   b    22     333  !!   ??",
    "def f(x, *, y=None):\n    return x**2 + y // 3  # comment\n\n\nclass A:\n\tpass\n",
    'for (int i = 0; i < 10; ++i) { printf("%d\\n", i); } // done\r\n',
    "https://example.org/a/b?c=d&e=f#g  //path/to/x\n/",
    "camelCaseString HTTPServer XMLHttpRequest iPhone McDonald ABCdef aBC",
    CASES,
    MARKS,
    (
        "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3068\u6f22\u5b57\u3001\u6df7\u3058\u308a\u3002"
        "\u4e2d\u6587\u5b57\u7b26\uff0c\u8fd8\u6709English\u5355\u8bcd123\u4e2a"
    ),
    "\ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8 \u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22",
    INDIC,
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001f642\U0001f642\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u2705 \u26a0\ufe0f ok\U0001f600",
    SEPARATORS,
    "\x00\x01\x02 a\x07b \x7f",
    "......!!!!!!?????? ---- ==== \u2026\u2026 \u2014 \u201cquoted\u201d \u2018single\u2019 $100 \u20ac5 50%",
    "<|im_start|>user\nhi<|im_end|> <|not_special|> <s> </s> [INST]",
    "#include <stdio.h>\n\n#define MAX(a,b) ((a)>(b)?(a):(b))",
    '{"key": ["value", 1, 2.5, null, true]}',
    "The quick brown fox jumps over the lazy dog. " * 3,
    "a" * 70 + " " * 40 + "-" * 50,
]
