"""Short texts of several kinds, to see how many characters a tokenizer makes of a token."""

from __future__ import annotations

_PROSE = """\
A headrace is the channel that leads water from a river or a pond to the wheel of a mill. Its \
fall is gentle, so that little is lost on the way; all of the height is kept for the wheel \
itself. The miller opens a gate in the morning, waits until the channel is full, and then lets \
the stones turn slowly. In dry summers he shared the water with his neighbours, hour by hour, \
and a book was kept of who had used how much. When the season was wet, nobody asked. Old maps \
still show these channels, although most of the wheels disappeared long ago, and children who \
play beside them rarely know what they were for.
"""

_CODE = '''\
def merge(left: list[int], right: list[int]) -> list[int]:
    """Both lists are sorted; so is the result."""
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value
'''

_JSON = """\
{
  "order": {"id": 48213, "created_at": "2024-03-18T09:41:27Z", "status": "shipped"},
  "express": false,
  "customer": {"name": "Ada Miller", "email": "ada.miller@example.com", "address": null},
  "items": [
    {"sku": "MX-2201", "title": "Oak shelf, 120 cm", "quantity": 2, "price": 74.5},
    {"sku": "KL-0098", "title": "Wall hook", "quantity": 12, "price": 3.25}
  ],
  "total": {"net": 188.0, "tax": 35.72, "currency": "EUR"}
}
"""

_CHINESE = """\
水渠把河里的水引到磨坊的水轮旁边。它的坡度很小,所以路上几乎没有损失,全部的落差都留给水轮。早晨,磨坊主打开闸门,\
等水渠灌满以后,石磨才慢慢转起来。夏天缺水的时候,他和邻居们按小时分水,并且记下每一家用了多少。雨季来了,\
就没有人再过问这些事情。古老的地图上还能看到这样的水渠,虽然大部分水轮早已消失,在旁边玩耍的孩子们也不知道它们从前的用处。
"""

_JAPANESE = """\
水路は川の水を水車小屋まで運びます。傾きはとてもゆるやかなので、途中で失われるものはほとんどなく、高さはすべて水車のために残されます。\
朝になると粉ひきは門を開け、水路がいっぱいになるまで待ってから、石臼をゆっくりと回します。雨の少ない夏には、近所の人たちと時間を決めて水を分け合い、\
だれがどれだけ使ったかを帳面につけました。古い地図にはまだこのような水路がのっていますが、水車の多くはもうありません。
"""

SAMPLES = {
    "prose": _PROSE,
    "code": _CODE,
    "JSON": _JSON,
    "CJK": _CHINESE,
    "Japanese": _JAPANESE,
}
