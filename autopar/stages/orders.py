"""stand-in"""
from __future__ import annotations
import re
from dataclasses import dataclass
@dataclass(frozen=True, slots=True)
class Action:
    kind: str
    stage: int
    turn: int
    def __str__(self): return f"{self.stage}{self.kind}{self.turn}"
    @staticmethod
    def of(text):
        s,k,t=re.fullmatch(r"(\d+)([FBIW])(\d+)",text).groups(); return Action(k,int(s),int(t))
@dataclass(frozen=True, slots=True)
class Order:
    place: tuple
    turns: int
    actions: tuple
    def of_(self, c): return self.actions[c]
    def texts(self): return tuple(" ".join(map(str,a)) for a in self.actions)
def _of(place,turns,texts): return _O(tuple(place),turns,tuple(tuple(map(Action.of,t.split())) for t in texts))
class _O(Order):
    def of(self,c): return self.actions[c]
Order.of=staticmethod(_of)
def order_of(name,p,n,**k):
    out=[]
    for r in range(p):
        F=lambda m:Action("F",r,m); B=lambda m:Action("B",r,m)
        if name=="gpipe": out.append(tuple([F(i) for i in range(n)]+[B(i) for i in range(n)])); continue
        w=min(p-1-r,n); a=[F(i) for i in range(w)]; f,b=w,0
        while f<n: a+=[F(f),B(b)]; f+=1;b+=1
        while b<n: a.append(B(b)); b+=1
        out.append(tuple(a))
    return _O(tuple(range(p)),n,tuple(out))
ORDERS={"gpipe":0,"1f1b":0}
