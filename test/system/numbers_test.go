package system

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// Random calls with long numbers verify at a receiver in JavaScript that parses and
// stringifies the body: at the first attempt, after retries, and after a redelivery. A
// destination with body.numbers Exact gets the same messages with every digit.
func TestLongNumbersVerifyInJavaScript(t *testing.T) {
	const calls, batch, letter = 1000, 100, 1
	r, exact := newReceiver(t), newReceiver(t)
	// The first call is rejected; some others fail temporarily.
	r.set(func(int) int { return http.StatusUnprocessableEntity })
	p := start(t, map[string]string{
		"source.yaml": source(),
		"crm.yaml":    destination("crm", r.URL, "  delivery: {retry: {initialBackoff: 10ms, maxBackoff: 100ms}}\n"),
		"exact.yaml":  destination("exact", exact.URL, "  body: {numbers: Exact}\n"),
	})
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	sent := map[string]string{} // messageId -> the number in the call
	call := func() string {
		id, number := fmt.Sprint("m", len(sent)), longNumber(random)
		sent[id] = number
		return fmt.Sprintf(`{"type":"track","userId":"u","event":"E","messageId":%q,"properties":{"long":%s,"more":[%s,{"%s":%[3]s}],"double":%s,"text":"%[2]s"}}`,
			id, number, longNumber(random), number, strconv.FormatFloat(random.NormFloat64(), 'e', 25, 64))
	}
	p.mustPost("/v1/batch", `{"batch":[`+call()+`]}`)
	wait.For(p.T, "a dead letter", func() error {
		if _, _, dead, _ := p.ledger("crm"); dead != letter {
			return fmt.Errorf("%d dead letters", dead)
		}
		return nil
	})
	failures := 0
	r.set(func(int) int {
		if failures++; failures%10 == 0 {
			return http.StatusServiceUnavailable
		}
		return http.StatusOK
	})
	for len(sent) < calls {
		var bodies []string
		for range min(batch, calls-len(sent)) {
			bodies = append(bodies, call())
		}
		p.mustPost("/v1/batch", `{"batch":[`+strings.Join(bodies, ",")+`]}`)
	}
	p.arrive(r, calls-letter)
	if out, errs, code := cli(t, "", "deadletters", "redeliver", "crm", "--all", "--admin", p.Admin); code != 0 {
		t.Fatalf("redeliver: got exit code %d, want 0: %s%s", code, out, errs)
	}
	got := p.arrive(r, calls)
	verifyInNode(t, got)
	digits := map[string]string{}
	for _, q := range p.arrive(exact, calls) {
		digits[q.id()] = q.body
	}
	for _, q := range got {
		number := sent[q.id()]
		if want := `"long":"` + number + `"`; !strings.Contains(q.body, want) {
			t.Errorf("message %s: got %s, want one with %s", q.id(), q.body, want)
		}
		if want := `"long":` + number; !strings.Contains(digits[q.id()], want) {
			t.Errorf("message %s of the exact destination: got %s, want one with %s", q.id(), digits[q.id()], want)
		}
		if fixed, err := event.FixedPoint([]byte(digits[q.id()])); err != nil || string(fixed) != q.body {
			t.Errorf("message %s of the exact destination with long numbers as strings: got %s and error %v, want %s", q.id(), fixed, err, q.body)
		}
	}
	check.Equal(t, "requests without a valid signature", r.unsigned, 0)
	check.Equal(t, "requests without a valid signature at the exact destination", exact.unsigned, 0)
}

// longNumber returns a literal that JavaScript would change.
func longNumber(random *rand.Rand) string {
	sign := []string{"", "-"}[random.IntN(2)]
	switch random.IntN(4) {
	case 0: // A 64-bit identifier. Because of its last digit no shorter double equals it.
		return sign + strconv.FormatUint(random.Uint64()|1<<62|1, 10)
	case 1: // nanoseconds
		return strconv.FormatInt(1_600_000_000_000_000_001+random.Int64N(1e17)*10, 10)
	case 2: // beyond the range
		return sign + strconv.Itoa(1+random.IntN(9)) + "e" + strconv.Itoa(309+random.IntN(1000))
	}
	return sign + "1" + strconv.FormatUint(random.Uint64(), 10) + strconv.FormatUint(random.Uint64(), 10) + "1"
}
