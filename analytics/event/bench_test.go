package event

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"
)

const benchContext = `"context":{"app":{"name":"InitechGlobal","version":"545","build":"3.0.1.545"},"campaign":{"name":"TPS Innovation Newsletter","source":"Newsletter","medium":"email"},` +
	`"device":{"id":"B5372DB0-C21E-11E4-8DFC-AA07A5B093DB","manufacturer":"Apple","model":"iPhone7,2","type":"ios"},"ip":"8.8.8.8","library":{"name":"analytics.js","version":"2.11.1"},` +
	`"locale":"en-US","network":{"carrier":"T-Mobile US","cellular":true,"wifi":false},"os":{"name":"iPhone OS","version":"8.1.3"},` +
	`"page":{"path":"/academy/","referrer":"","search":"","title":"Analytics Academy","url":"https://shop.example/academy/"},"timezone":"Europe/Amsterdam"}`

const benchCommon = `"anonymousId":"507f191e810c19729de860ea","userId":"97980cfea0067","messageId":"022bb90c-bbac-11e4-8dfc-aa07a5b093db",` +
	`"timestamp":"2026-05-04T11:59:58.400Z","sentAt":"2026-05-04T11:59:59.900Z","integrations":{"All":true},` + benchContext

// benchCalls has calls of about 1 KB, with a full context.
var benchCalls = map[Type]string{
	Identify: `{"type":"identify","traits":{"name":"Peter Gibbons","email":"peter@example.com","plan":"premium","logins":5,"balance":12.5},` + benchCommon + `}`,
	Track: `{"type":"track","event":"Order Completed","properties":{"order_id":"50314b8e9bcf000000000000","total":27.5,"currency":"USD","products":[` +
		`{"product_id":"507f1f77bcf86cd799439011","sku":"45790-32","price":19,"quantity":1}]},` + benchCommon + `}`,
	Page:   `{"type":"page","name":"Home","properties":{"path":"/","referrer":"https://search.example/","title":"Home","url":"https://shop.example/"},` + benchCommon + `}`,
	Screen: `{"type":"screen","name":"Settings","properties":{"variation":"blue signup button"},` + benchCommon + `}`,
	Group:  `{"type":"group","groupId":"0e8c78ea9d97a7b8185e8632","traits":{"name":"Initech","industry":"Technology","employees":329,"plan":"enterprise"},` + benchCommon + `}`,
	Alias:  `{"type":"alias","previousId":"507f191e81",` + benchCommon + `}`,
}

func benchmarkParse(b *testing.B, t Type) {
	body := []byte(benchCalls[t])
	b.Run("event", func(b *testing.B) {
		r := Request{Type: t, ReceivedAt: time.Now()}
		b.SetBytes(int64(len(body)))
		b.ReportAllocs()
		for b.Loop() {
			if _, err := r.Parse(body); err != nil {
				b.Fatal(err)
			}
		}
	})
	benchmarkUnmarshal(b, body)
}

// benchmarkUnmarshal measures only the decoding of the same bytes.
func benchmarkUnmarshal(b *testing.B, body []byte) {
	b.Run("encoding-json", func(b *testing.B) {
		b.SetBytes(int64(len(body)))
		b.ReportAllocs()
		for b.Loop() {
			var v map[string]any
			if err := json.Unmarshal(body, &v); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkParseIdentify(b *testing.B) { benchmarkParse(b, Identify) }
func BenchmarkParseTrack(b *testing.B)    { benchmarkParse(b, Track) }
func BenchmarkParsePage(b *testing.B)     { benchmarkParse(b, Page) }
func BenchmarkParseScreen(b *testing.B)   { benchmarkParse(b, Screen) }
func BenchmarkParseGroup(b *testing.B)    { benchmarkParse(b, Group) }
func BenchmarkParseAlias(b *testing.B)    { benchmarkParse(b, Alias) }

// BenchmarkParseBatch parses 20 calls that share the batch's context; the figures are
// for the batch.
func BenchmarkParseBatch(b *testing.B) {
	body := []byte(`{"batch":[`)
	for i := range 20 {
		body = fmt.Appendf(body, `{"type":"track","messageId":"022bb90c-bbac-11e4-8dfc-aa07a5b0%04d","userId":"97980cfea0067","event":"Order Completed",`+
			`"timestamp":"2026-05-04T11:59:58.400Z","properties":{"order_id":"50314b8e9bcf000000000000","total":27.5,"currency":"USD"}},`, i)
	}
	body = append(body[:len(body)-1], `],"sentAt":"2026-05-04T11:59:59.900Z",`+benchContext+`}`...)
	b.Run("event", func(b *testing.B) {
		r := Request{ReceivedAt: time.Now(), ClientIP: netip.MustParseAddr("192.0.2.1"), FromBrowser: true}
		b.SetBytes(int64(len(body)))
		b.ReportAllocs()
		for b.Loop() {
			if batch, err := r.Parse(body); err != nil || len(batch.Calls) != 20 {
				b.Fatal(err)
			}
		}
	})
	benchmarkUnmarshal(b, body)
}

// BenchmarkCanonical converts a text with many differences from its canonical form.
func BenchmarkCanonical(b *testing.B) {
	text, err := os.ReadFile("testdata/track.in.json")
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Canonical(text); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkLongNumbers measures the acceptance of a call of about 1 KB with two long numbers,
// and the additional cost of its delivery.
func BenchmarkLongNumbers(b *testing.B) {
	body := []byte(strings.Replace(benchCalls[Track], `"total":27.5`, `"total":27.5,"order":12345678901234567890,"at":1700000000000000001`, 1))
	r := Request{Type: Track, ReceivedAt: time.Now()}
	b.Run("Parse", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if batch, err := r.Parse(body); err != nil || !batch.Calls[0].LongNumbers {
				b.Fatal(err)
			}
		}
	})
	batch, err := r.Parse(body)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("FixedPoint", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := FixedPoint(batch.Calls[0].Body); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkNumbers converts texts of 100 KB of numbers of one kind, including kinds for which
// strconv is slow.
func BenchmarkNumbers(b *testing.B) {
	for name, number := range map[string]string{
		"integers": "12345", "decimals": "27.5", "doubles": "0.30000000000000004", "identifiers": "12345678901234567890", "smallest": "5e-324",
		"small":   "1e-310",
		"borders": "1.100000000000000132106081704614e300", "halves": "9007199254740993e0", "digits": "1." + strings.Repeat("3", 1000) + "e-300",
	} {
		b.Run(name, func(b *testing.B) {
			text := []byte("[" + strings.Repeat(number+",", 100_000/len(number)) + "0]")
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				if _, err := FixedPoint(text); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
