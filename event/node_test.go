package event

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// judge is the program that Node runs: one line in is the kind of check, the
// input (base64) and what was made of it, or "!" when it was refused. One line
// out, "ok" and the number of checks, or the first fault.
const judge = `
'use strict'
const own = ['writeKey', 'type', 'messageId', 'version', 'receivedAt', 'sentAt', 'originalTimestamp', 'timestamp', 'Previous ID', 'User ID']
const without = (o) => { for (const k of own) delete o[k]; return JSON.stringify(o) }
let checks = 0
function check(line) {
  const [kind, base64, ...rest] = line.split('\t')
  const output = rest.join('\t')
  const input = Buffer.from(base64, 'base64').toString('utf8').replace(/^\uFEFF/, '')
  let parsed
  try { parsed = JSON.parse(input) } catch (e) { return output === '!' ? '' : 'accepted what is not JSON' }
  if (output === '!') return 'refused JSON'
  const again = JSON.stringify(JSON.parse(output))
  const wide = kind[1] === 'w' // holds numbers that no double holds
  if (!wide && again !== output) return 'not a fixed point: ' + again
  if (kind[0] === 'c') {
    const want = JSON.stringify(parsed)
    if (again !== want) return 'differs from ' + want
  } else {
    const message = JSON.parse(output)
    if (message.context.ip === '192.0.2.1' && parsed.context?.ip === undefined) delete message.context.ip
    if (parsed.context == null) delete message.context
    const want = without(parsed), got = without(message)
    if (got !== want) return 'members differ, ' + got + ' from ' + want
  }
  checks++
  return ''
}
let bad = ''
require('readline').createInterface({ input: process.stdin, crlfDelay: Infinity })
  .on('line', (line) => { if (!bad) { const e = check(line); if (e) bad = e + ' in ' + line } })
  .on('close', () => console.log(bad || 'ok ' + checks))
`

// TestFixedPointInNode holds what Canonical and Parse make of generated,
// hostile JSON against a real JavaScript engine.
func TestFixedPointInNode(t *testing.T) {
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("node is not on the PATH: the fixed point is not checked against a JavaScript engine")
	}
	bodies := 50_000
	if testing.Short() {
		bodies = 2_000
	}
	if v := os.Getenv("POSTHORN_FIXED_POINT_BODIES"); v != "" {
		if bodies, err = strconv.Atoi(v); err != nil {
			t.Fatalf("POSTHORN_FIXED_POINT_BODIES: %v", err)
		}
	}
	seed := uint64(time.Now().UnixNano())
	if v := os.Getenv("POSTHORN_FIXED_POINT_SEED"); v != "" {
		if seed, err = strconv.ParseUint(v, 10, 64); err != nil {
			t.Fatalf("POSTHORN_FIXED_POINT_SEED: %v", err)
		}
	}
	t.Logf("POSTHORN_FIXED_POINT_BODIES=%d POSTHORN_FIXED_POINT_SEED=%d", bodies, seed)

	cmd := exec.Command(node, "-e", judge)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var verdict, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &verdict, &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w := bufio.NewWriterSize(stdin, 1<<20)
	g := &generator{r: rand.New(rand.NewPCG(seed, 1))}
	want := 0
	for i := range bodies {
		if !g.send(w, i, &want) {
			break // node is gone, its verdict says why
		}
	}
	_ = w.Flush()
	if err := stdin.Close(); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("node: %v\n%s", err, stderr.Bytes())
	}
	if got := strings.TrimSpace(verdict.String()); got != fmt.Sprintf("ok %d", want) {
		t.Errorf("node says %.2000s, want ok %d", got, want)
	}
}

// send makes one body and gives it, with what this package makes of it, to Node.
func (g *generator) send(w io.Writer, i int, accepted *int) bool {
	g.b, g.depth = g.b[:0], 0
	g.wide = i%8 == 0
	kind, output := []byte("c "), []byte("!")
	if g.wide {
		kind[1] = 'w'
	}
	switch i % 3 {
	case 0, 1:
		g.value()
		if i%5 == 0 {
			g.damage()
			kind[1] = 'w' // it may have changed a number
		}
		if out, err := Canonical(g.b); err == nil {
			output = out
			*accepted++
		}
	case 2:
		kind[0] = 'p'
		g.call()
		types := []Type{Identify, Track, Page, Screen, Group, Alias}
		r := Request{Type: types[g.r.IntN(len(types))], ReceivedAt: time.UnixMilli(1700000000000)}
		if g.r.IntN(2) == 0 {
			r.ClientIP = "192.0.2.1"
		}
		batch, err := r.Parse(g.b)
		if fault, ok := errors.AsType[*Error](err); ok && fault.Code == CodeCallTooLarge {
			return true
		}
		if err == nil {
			output = batch.Calls[0].Body
		}
		*accepted++ // the generated call is valid: a refusal is a fault
	}
	_, err := fmt.Fprintf(w, "%s\t%s\t%s\n", kind, base64.StdEncoding.EncodeToString(g.b), output)
	return err == nil
}

// generator writes hostile but valid JSON.
type generator struct {
	r     *rand.Rand
	b     []byte
	depth int
	wide  bool // with numbers that no double holds
}

func (g *generator) add(s string) { g.b = append(g.b, s...) }

func pick[T any](g *generator, of ...T) T { return of[g.r.IntN(len(of))] }

func (g *generator) space() {
	if g.r.IntN(4) == 0 {
		g.add(pick(g, " ", "\n", "\t", "\r\n", "    ", " \t\n\r "))
	}
}

func (g *generator) value() {
	g.space()
	defer g.space()
	kinds := 10
	if g.depth > 6 {
		kinds = 8
	}
	switch k := g.r.IntN(kinds); k {
	case 0:
		g.add(pick(g, "true", "false", "null"))
	case 1, 2, 3, 4:
		g.number()
	case 5, 6, 7:
		g.string()
	case 8:
		if g.r.IntN(200) == 0 {
			g.deep()
			return
		}
		g.list('[', ']', func() { g.value() })
	case 9:
		g.list('{', '}', func() {
			g.key()
			g.space()
			g.add(":")
			g.value()
		})
	}
}

func (g *generator) deep() {
	n := g.r.IntN(MaxDepth - 20)
	g.add(strings.Repeat(`[{"a":`, n/2))
	g.add("0")
	g.add(strings.Repeat("}]", n/2))
}

func (g *generator) list(open, closing byte, element func()) {
	g.depth++
	g.b = append(g.b, open)
	n := g.r.IntN(6)
	if g.r.IntN(20) == 0 {
		n = g.r.IntN(40)
	}
	if g.depth > 3 {
		n /= 2
	}
	for i := range n {
		if i > 0 {
			g.add(",")
		}
		g.space()
		element()
		g.space()
	}
	g.b = append(g.b, closing)
	g.depth--
}

func (g *generator) key() {
	switch g.r.IntN(8) {
	case 0, 1:
		g.add(pick(g, `""`, `"__proto__"`, `"constructor"`, `"a"`, `"A"`, `"\u0061"`, `"toString"`, `"length"`, `"hasOwnProperty"`, `"toJSON"`))
	case 2, 3, 4:
		g.add(pick(g, `"0"`, `"1"`, `"2"`, `"10"`, `"9"`, `"00"`, `"01"`, `"-1"`, `"-0"`, `"1.5"`, `"1e3"`, `"\u0031"`, `"\u0031\u0030"`,
			`"4294967294"`, `"4294967295"`, `"4294967296"`, `"4294967293"`, `"9007199254740993"`, `"99999999999999999999"`, `"1 "`, `"٣"`))
	case 5:
		g.add(strconv.Quote(strconv.Itoa(g.r.IntN(50))))
	case 6:
		g.add(`"k` + strconv.Itoa(g.r.IntN(12)) + `"`)
	default:
		g.string()
	}
}

func (g *generator) string() {
	g.add(`"`)
	n := g.r.IntN(12)
	if g.r.IntN(30) == 0 {
		n = g.r.IntN(300)
	}
	for range n {
		switch g.r.IntN(12) {
		case 0:
			g.add(pick(g, `\"`, `\\`, `\/`, `\b`, `\f`, `\n`, `\r`, `\t`))
		case 1:
			g.add(pick(g, `\u0022`, `\u005c`, `\u002F`, `\u0000`, `\u001F`, `\u001f`, `\u0008`, `\u000a`, `\u000B`, `\u007f`, `\u00e9`, `\u2028`, `\u2029`, `\uFFFF`, `\uFEFF`))
		case 2:
			g.add(fmt.Sprintf(pick(g, `\u%04x`, `\u%04X`), g.r.IntN(1<<16)))
		case 3:
			g.add(fmt.Sprintf(pick(g, `\u%04x`, `\u%04X`), 0xd800+g.r.IntN(0x800)))
		case 4:
			g.add(pick(g, "\u2028", "\u2029", "é", "\u007f", "\ufeff", "\ufffd", "\uffff", "😀", "\U0010ffff", "<", ">", "&", "'"))
		case 5:
			g.b = append(g.b, string(rune(0x80+g.r.IntN(0x10ff80)))...)
		case 6:
			if g.r.IntN(10) == 0 {
				g.b = append(g.b, byte(0x80+g.r.IntN(128))) // rarely UTF-8
			}
		case 7:
			if g.r.IntN(10) == 0 { // the beginning of a character
				c := string(rune(0x80 + g.r.IntN(0x10ff80)))
				g.b = append(g.b, c[:1+g.r.IntN(len(c)-1)]...)
			}
		default:
			g.add(pick(g, "a", "bc", "Hello, World", "012345678", "order completed with a longer text", " "))
		}
	}
	g.add(`"`)
}

func (g *generator) number() {
	sign := pick(g, "", "", "-")
	double := math.Float64frombits(g.r.Uint64() &^ (1 << 63))
	if math.IsNaN(double) || math.IsInf(double, 0) {
		double = 0
	}
	if g.r.IntN(2) == 0 { // of everyday size
		double = g.r.Float64() * math.Pow10(g.r.IntN(40)-12)
	}
	kinds := 12
	if g.wide {
		kinds = 16
	}
	text := ""
	switch g.r.IntN(kinds) {
	case 0:
		text = strconv.Itoa(g.r.IntN(1000))
	case 1:
		text = strconv.FormatInt(g.r.Int64N(1<<53+1), 10)
	case 2:
		text = strconv.Itoa(g.r.IntN(1000)) + "." + fmt.Sprintf("%0*d", 1+g.r.IntN(8), g.r.IntN(10))
	case 3: // the double, shortest, but never as an integer that JavaScript would print otherwise
		text = strconv.FormatFloat(double, pick(g, byte('e'), byte('E')), -1, 64)
	case 4: // as C, PHP, Java and others print doubles
		text = strconv.FormatFloat(double, 'e', 16, 64)
	case 5:
		text = strconv.FormatFloat(double, 'e', 16+g.r.IntN(40), 64)
	case 6:
		text = strconv.FormatFloat(g.r.Float64(), 'f', 17+g.r.IntN(40), 64)
	case 7:
		text = pick(g, "0", "0.0", "0e0", "0E+5", "0.000e-3", "1.0", "1e0", "1E2", "1.50", "1e21", "1e20", "1e-6", "1e-7", "0.000001", "0.0000001",
			"123456789012345680000", "1e300", "1.7976931348623157e308", "5e-324", "4.9E-324", "2.2250738585072014e-308", "0.1", "1.10",
			"9007199254740991", "9007199254740992", "9007199254740994", "100000000000000000000", "1000000000000000000000", "0.30000000000000004")
	case 8:
		text = fmt.Sprintf("%d%s%d", g.r.IntN(1000), pick(g, "e", "E", "e+", "e-", "E-", "e0", "e-0"), g.r.IntN(25))
	case 9:
		text = fmt.Sprintf("%d.%de%d", g.r.IntN(10), g.r.IntN(1000000), g.r.IntN(40)-20)
	case 10: // many zeros and an exponent that undoes them
		n := g.r.IntN(60)
		text = "0." + strings.Repeat("0", n) + strconv.Itoa(1+g.r.IntN(999)) + "e" + strconv.Itoa(n+g.r.IntN(6)-3)
	case 11:
		text = strconv.Itoa(1+g.r.IntN(999)) + strings.Repeat("0", g.r.IntN(40))
	case 12:
		text = strconv.FormatUint(g.r.Uint64()|1<<60, 10)
	case 13:
		text = pick(g, "1e400", "1e-400", "12345678901234567890", "9007199254740993", "0.1234567890123456789", "1e99999999999999999999", "0e99999999999999999999",
			"1.7976931348623159e308", "1.7976931348623158e308", "1152921504606846976", "3e-324", "2e-324")
	case 14:
		text = strconv.Itoa(1+g.r.IntN(9)) + strconv.FormatUint(g.r.Uint64(), 10) + "." + strconv.FormatUint(g.r.Uint64(), 10)
	case 15:
		text = strconv.FormatUint(1+g.r.Uint64N(1<<63), 10) + "e" + strconv.Itoa(g.r.IntN(700)-350)
	}
	g.add(sign + text)
}

// damage makes a text that is most probably no JSON any more.
func (g *generator) damage() {
	if len(g.b) == 0 {
		return
	}
	i := g.r.IntN(len(g.b))
	switch g.r.IntN(4) {
	case 0:
		g.b = g.b[:i]
	case 1:
		g.b[i] = pick(g, byte(','), '"', '\\', '}', ']', ':', '0', 0, 0x1f, ' ', '\n', 0xff, 'e', '.', '-')
	case 2:
		g.b = append(g.b[:i], g.b[i+1:]...)
	case 3:
		g.b = append(g.b[:i:i], append([]byte(pick(g, ",", `"`, "}", "]", "{", "[", "0", "-", ".", "e5", "\ufeff", "\u00a0", "//", "NaN")), g.b[i:]...)...)
	}
}

// call writes a call that is valid for every type, with hostile members.
func (g *generator) call() {
	members := []string{`"userId":"u"`, `"event":"e"`, `"groupId":"g"`, `"previousId":"p"`}
	if g.r.IntN(2) == 0 {
		members = append(members, `"timestamp":"2023-11-14T22:13:20.000Z"`)
	}
	if g.r.IntN(2) == 0 {
		members = append(members, `"sentAt":"2023-11-14T22:13:21.500Z"`, `"writeKey":"k"`)
	}
	for range g.r.IntN(8) {
		members = append(members, "")
	}
	g.r.Shuffle(len(members), func(i, j int) { members[i], members[j] = members[j], members[i] })
	g.depth++
	g.add("{")
	for i, m := range members {
		if i > 0 {
			g.add(",")
		}
		g.space()
		g.add(m)
		if m != "" {
			continue
		}
		switch g.r.IntN(4) {
		case 0:
			g.add(pick(g, `"traits":`, `"properties":`, `"integrations":`, `"context":`))
			g.list('{', '}', func() { g.key(); g.add(":"); g.value() })
		default:
			key := len(g.b)
			g.key()
			// Not a key that has rules of its own.
			var name string
			if json.Unmarshal(g.b[key:], &name) == nil && fieldOf([]byte(strconv.Quote(name))) != fieldOther {
				g.b = append(g.b[:key], `"other"`...)
			}
			g.add(":")
			g.value()
		}
	}
	g.space()
	g.add("}")
	g.depth--
}
