package expression

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
)

// The units of Size bound the memory of an expression: 1,000,000 instructions and 200,000 nodes, the budget of an
// installation, fit beside everything else in the default memory of a dispatcher.
func TestSizeBoundsMemory(t *testing.T) {
	for name, of := range map[string]func(i int) string{
		"nodes": func(i int) string {
			return strings.TrimSuffix(strings.Repeat("call.a.b == 1||", 65), "||") + fmt.Sprint("||call.c == ", i)
		},
		"loops": func(i int) string {
			return strings.TrimSuffix(strings.Repeat("call.a.exists(i,i.b==1)||", 38), "||") + fmt.Sprint("||call.c == ", i)
		},
		"instructions": func(i int) string {
			return strings.TrimSuffix(strings.Repeat("call.a.matches('.{0,99}')||", 10), "||") + fmt.Sprint("||call.c == ", i)
		},
		"classes": func(i int) string {
			return strings.TrimSuffix(strings.Repeat(`call.a.matches(r'\pL\pN\PL')||`, 10), "||") + fmt.Sprint("||call.c == ", i)
		},
	} {
		const n = 40
		var before, after runtime.MemStats
		compiled(t, of(0))
		runtime.GC()
		runtime.ReadMemStats(&before)
		var all []*Program
		var size Size
		for i := range n {
			p := compiled(t, of(i))
			size = size.Plus(p.Size())
			all = append(all, p)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		used := int(after.HeapAlloc - before.HeapAlloc)
		limit := 100*size.Instructions + 200*size.Nodes
		t.Logf("%s: %d bytes for %+v; %d for each node, %d for each instruction", name, used, size, used/max(size.Nodes, 1), used/max(size.Instructions, 1))
		if used > limit {
			t.Errorf("%s: %d expressions of the size %+v use %d bytes; want at most %d", name, n, size, used, limit)
		}
		runtime.KeepAlive(all)
	}
}
