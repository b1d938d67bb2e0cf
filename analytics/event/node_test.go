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
	"math/big"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// nodeProgram is the program that Node runs. A line of its input has the kind of check, the
// input (base64), the canonical form and the fixed point, or "!" if the input
// was rejected. The program prints "ok" and the number of checks, or the first fault.
const nodeProgram = `
'use strict'
const own = ['writeKey', 'type', 'messageId', 'version', 'receivedAt', 'sentAt', 'originalTimestamp', 'timestamp', 'Previous ID', 'User ID']
const without = (o) => { for (const k of own) delete o[k]; return JSON.stringify(o) }
const again = (json) => JSON.stringify(JSON.parse(json))

// Returns all digits of an integer that JavaScript prints.
function printed(n) {
  const [, sign, whole, fraction, exponent] = /^(-?)(\d+)(?:\.(\d+))?(?:e\+(\d+))?$/.exec(String(n))
  return sign + whole + (fraction ?? '') + '0'.repeat(Number(exponent ?? 0) - (fraction ?? '').length)
}
function isLong(number) {
  if (!Number.isFinite(Number(number))) return true
  return /^-?\d+$/.test(number) && BigInt(number) !== BigInt(printed(Number(number)))
}
// Converts the tokens of valid JSON: a string is unchanged, a long number becomes a string.
const longAsString = (json) => json.replace(/"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g,
  (token) => token[0] !== '"' && isLong(token) ? '"' + token + '"' : token)

let checks = 0
function check(line) {
  const [kind, base64, canonical, fixed] = line.split('\t')
  const input = Buffer.from(base64, 'base64').toString('utf8').replace(/^\uFEFF/, '')
  try { JSON.parse(input) } catch (e) { return canonical === '!' ? '' : 'accepted invalid JSON' }
  if (canonical === '!') return 'rejected valid JSON'
  if (again(fixed) !== fixed) return 'not a fixed point: ' + again(fixed)
  if (again(longAsString(canonical)) !== fixed) return 'fixed point of the canonical form: ' + again(longAsString(canonical))
  const want = longAsString(input)
  if (kind === 'call') {
    const message = JSON.parse(fixed), parsed = JSON.parse(want)
    if (message.context.ip === '192.0.2.1' && parsed.context?.ip === undefined) delete message.context.ip
    if (parsed.context == null) delete message.context
    if (without(message) !== without(parsed)) return 'members: got ' + without(message) + ', want ' + without(parsed)
  } else if (again(want) !== fixed) {
    return 'want ' + again(want)
  }
  checks++
  return ''
}
let bad = ''
require('readline').createInterface({ input: process.stdin, crlfDelay: Infinity })
  .on('line', (line) => { if (!bad) { const e = check(line); if (e) bad = e + ' in ' + line } })
  .on('close', () => console.log(bad || 'ok ' + checks))
`

// TestFixedPointInNode compares the results of Canonical, FixedPoint and Parse for generated
// JSON with a JavaScript engine.
func TestFixedPointInNode(t *testing.T) {
	node, err := exec.LookPath("node")
	if err != nil {
		if os.Getenv("POSTHORN_TEST_ALL") != "" { // See test/need in the repository's root.
			t.Fatal(err)
		}
		t.Skip("cannot run here: Debian's package nodejs is required:", err)
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

	cmd := exec.Command(node, "-e", nodeProgram)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w := bufio.NewWriterSize(stdin, 1<<20)
	g := &generator{r: rand.New(rand.NewPCG(seed, 1))}
	want := 0
	for i := range bodies {
		if !g.send(w, i, &want) {
			break // Node has exited; its output gives the reason.
		}
	}
	_ = w.Flush()
	if err := stdin.Close(); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("node: got error %v, want none\n%s", err, stderr.Bytes())
	}
	if got := strings.TrimSpace(stdout.String()); got != fmt.Sprintf("ok %d", want) {
		t.Errorf("output of Node: got %.20000s, want ok %d", got, want)
	}
}

// send generates one body and writes it, with the results of this package, for Node.
func (g *generator) send(w io.Writer, i int, accepted *int) bool {
	g.b, g.depth = g.b[:0], 0
	kind, canonical, fixed := "value", []byte("!"), []byte("!")
	var err error
	switch i % 4 {
	case 0, 1:
		g.value()
		if i%5 == 0 {
			g.damage()
		}
	case 2: // only numbers
		g.list('[', ']', func() { g.number() })
	case 3:
		kind = "call"
		g.call()
		types := []Type{Identify, Track, Page, Screen, Group, Alias}
		r := Request{Type: types[g.r.IntN(len(types))], ReceivedAt: time.UnixMilli(1700000000000)}
		if g.r.IntN(2) == 0 {
			r.ClientIP, r.FromBrowser = netip.MustParseAddr("192.0.2.1"), g.r.IntN(2) == 0
		}
		var batch Batch
		batch, err = r.Parse(g.b)
		if fault := new(Error); errors.As(err, &fault) && fault.Code == CodeCallTooLarge {
			return true
		}
		*accepted++ // The generated call is valid: a rejection is a fault.
		if err == nil {
			c := batch.Calls[0]
			canonical = c.Body
			if fixed, err = FixedPoint(c.Body); c.LongNumbers == bytes.Equal(fixed, c.Body) {
				fixed = []byte("LongNumbers is incorrect")
			}
		}
	}
	if kind == "value" {
		if canonical, err = Canonical(g.b); err == nil {
			fixed, err = FixedPoint(g.b)
			*accepted++
		} else {
			canonical = []byte("!")
		}
	}
	if err != nil {
		fixed = []byte("!")
	}
	_, err = fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", kind, base64.StdEncoding.EncodeToString(g.b), canonical, fixed)
	return err == nil
}

// generator writes unusual but valid JSON.
type generator struct {
	r     *rand.Rand
	b     []byte
	depth int
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
			g.add(pick(g, `\u0022`, `\u005c`, `\u002F`, `\u0000`, `\u001F`, `\u001f`, `\u0008`, `\u000a`, `\u000B`, `\u007f`, `\u00e9`, `\u2028`,
				`\u2029`, `\uFFFF`, `\uFEFF`))
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
				g.b = append(g.b, byte(0x80+g.r.IntN(128))) // The result is rarely UTF-8.
			}
		case 7:
			if g.r.IntN(10) == 0 { // Append the first bytes of a character.
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
	if g.r.IntN(2) == 0 { // Use a double of usual size.
		double = g.r.Float64() * math.Pow10(g.r.IntN(40)-12)
	}
	text := ""
	switch g.r.IntN(19) {
	case 0:
		text = strconv.Itoa(g.r.IntN(1000))
	case 1:
		text = strconv.FormatInt(g.r.Int64N(1<<53+1), 10)
	case 2:
		text = strconv.Itoa(g.r.IntN(1000)) + "." + fmt.Sprintf("%0*d", 1+g.r.IntN(8), g.r.IntN(10))
	case 3: // the shortest form of the double
		text = strconv.FormatFloat(double, pick(g, byte('e'), byte('E')), -1, 64)
	case 4: // the format of C, PHP, Java and others
		text = strconv.FormatFloat(double, 'e', 16, 64)
	case 5:
		text = strconv.FormatFloat(double, 'e', 16+g.r.IntN(40), 64)
	case 6:
		text = strconv.FormatFloat(g.r.Float64(), 'f', 17+g.r.IntN(40), 64)
	case 7:
		text = pick(g, "0", "0.0", "0e0", "0E+5", "0.000e-3", "1.0", "1e0", "1E2", "1.50", "1e21", "1e20", "1e-6", "1e-7", "0.000001",
			"0.0000001",
			"123456789012345680000", "1e300", "1.7976931348623157e308", "5e-324", "4.9E-324", "2.2250738585072014e-308", "0.1", "1.10",
			"9007199254740991", "9007199254740992", "9007199254740994", "100000000000000000000", "1000000000000000000000", "0.30000000000000004")
	case 8:
		text = fmt.Sprintf("%d%s%d", g.r.IntN(1000), pick(g, "e", "E", "e+", "e-", "E-", "e0", "e-0"), g.r.IntN(25))
	case 9:
		text = fmt.Sprintf("%d.%de%d", g.r.IntN(10), g.r.IntN(1000000), g.r.IntN(40)-20)
	case 10: // many zeros and an exponent that compensates them
		n := g.r.IntN(60)
		text = "0." + strings.Repeat("0", n) + strconv.Itoa(1+g.r.IntN(999)) + "e" + strconv.Itoa(n+g.r.IntN(6)-3)
	case 11:
		text = strconv.Itoa(1+g.r.IntN(999)) + strings.Repeat("0", g.r.IntN(40))
	case 12: // 64-bit identifiers and nanoseconds
		text = strconv.FormatUint(g.r.Uint64()|1<<60, 10)
	case 13:
		text = pick(g, "1e400", "1e-400", "12345678901234567890", "9007199254740993", "0.1234567890123456789", "1e99999999999999999999",
			"0e99999999999999999999",
			"1.7976931348623159e308", "1.7976931348623158e308", "1152921504606846976", "3e-324", "2e-324", "2.4703282292062327e-324",
			"2.4703282292062328e-324", "1e-99999999999999999999")
	case 14:
		text = strconv.Itoa(1+g.r.IntN(9)) + strconv.FormatUint(g.r.Uint64(), 10) + "." + strconv.FormatUint(g.r.Uint64(), 10)
	case 15:
		text = strconv.FormatUint(1+g.r.Uint64N(1<<63), 10) + "e" + strconv.Itoa(g.r.IntN(700)-350)
	case 16: // the border between two doubles, and slightly above it
		text = border(double)
		if digits, exponent, ok := strings.Cut(text, "e"); ok {
			text = digits + pick(g, "", "0", "1", strings.Repeat("0", g.r.IntN(800))+"1") + "e" + exponent
		}
	case 17: // the smallest and the largest doubles
		text = strconv.Itoa(1+g.r.IntN(9)) + "." + strconv.FormatUint(g.r.Uint64(), 10) + "e" + pick(g, "308", "307", "-306", "-307", "-308",
			strconv.Itoa(-309-g.r.IntN(17)))
	case 18: // all digits of a large double, up to 309
		text = strings.TrimSuffix(strconv.FormatFloat(math.Abs(double), 'f', 0, 64), "-")
	}
	g.add(sign + text)
}

// border returns all digits of the number in the middle between a double and the next one.
func border(double float64) string {
	middle := new(big.Float).SetPrec(2000).SetFloat64(double)
	next := math.Nextafter(double, math.Inf(1))
	if math.IsInf(next, 1) {
		return "1.7976931348623158079372897140530341507993413271003782693617377898044496829276475094664901797758720709633028641669288791094655554785194040263065748867150582068e308"
	}
	middle.Add(middle, new(big.Float).SetFloat64(next))
	return middle.Quo(middle, big.NewFloat(2)).Text('e', 780)
}

// damage changes the text so that it is probably not JSON.
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
		g.b = append(g.b[:i:i], append([]byte(pick(g, ",", `"`, "}", "]", "{", "[", "0", "-", ".", "e5", "\ufeff", "\u00a0", "//", "NaN")),
			g.b[i:]...)...)
	}
}

// call writes a call that is valid for every type, with unusual members.
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
			// Keys with special rules are replaced.
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
