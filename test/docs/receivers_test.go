package docs

import (
	"encoding/hex"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/sign"
)

// receiver is a program for a snippet of docs/receiving.md.
type receiver struct {
	language, file string
	command        []string
	program        string
}

// receivers has programs for the snippets that verify. Each reads lines
// of a body, a signature and a secret, all in hex, and prints "true" or "false"
// for each.
var receivers = []receiver{
	{"js", "verify.js", []string{"node"}, `SNIPPET
for (const line of require('node:fs').readFileSync(0, 'utf8').trim().split('\n')) {
  const [body, signature, secret] = line.split(' ').map((hex) => Buffer.from(hex, 'hex'))
  console.log(authentic(body, signature.toString('latin1'), secret.toString()))
}`},
	{"python", "verify.py", []string{"python3"}, `SNIPPET
import sys
for line in sys.stdin:
    body, signature, secret = (bytes.fromhex(h) for h in line.rstrip("\n").split(" "))
    print(str(authentic(body, signature.decode("latin1"), secret.decode())).lower())`},
	{"go", "verify.go", []string{"go", "run"}, `package main

import ("bufio"; "crypto/hmac"; "crypto/sha1"; "encoding/hex"; "fmt"; "os"; "strings")

SNIPPET
func main() {
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var parts [3]string
		for i, h := range strings.Split(lines.Text(), " ") {
			b, _ := hex.DecodeString(h)
			parts[i] = string(b)
		}
		fmt.Println(authentic([]byte(parts[0]), parts[1], parts[2]))
	}
}`},
	{"ruby", "verify.rb", []string{"ruby"}, `SNIPPET
STDIN.each_line(chomp: true) { |line| puts authentic?(*line.split(/ /, -1).map { |h| [h].pack("H*") }) }`},
	{"php", "verify.php", []string{"php"}, `<?php
SNIPPET
foreach (file('php://stdin', FILE_IGNORE_NEW_LINES) as $line)
    echo json_encode(authentic(...array_map('hex2bin', explode(' ', $line)))), "\n";`},
	{"java", "Verify.java", []string{"java"}, `import static java.nio.charset.StandardCharsets.*;
import java.security.*; import java.util.*; import javax.crypto.Mac; import javax.crypto.spec.SecretKeySpec;
class Verify {
SNIPPET
public static void main(String[] args) throws Exception {
	for (Scanner in = new Scanner(System.in); in.hasNextLine();) {
		String[] parts = in.nextLine().split(" ", -1);
		byte[][] b = new byte[3][];
		for (int i = 0; i < 3; i++) b[i] = HexFormat.of().parseHex(parts[i]);
		System.out.println(authentic(b[0], new String(b[1], ISO_8859_1), new String(b[2], UTF_8)));
	}
}}`},
}

// The snippets in docs/receiving.md verify Posthorn's signatures and reject all others, in
// every language that is installed on this machine.
func TestReceivers(t *testing.T) {
	const body, secret = `{"event":"Ünïcödé \u2028 ✓","n":12345678901234567890}`, "schlüssel"
	signer, err := sign.New(liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret(secret)}})
	if err != nil {
		t.Fatal(err)
	}
	header := http.Header{}
	for _, h := range signer.Headers(nil, "id", time.Now(), []byte(body)) {
		header.Set(h.Name, h.Value)
	}
	signature := header.Get("X-Signature")
	var lines, want strings.Builder
	for _, c := range []struct {
		body, signature, secret string
		authentic               bool
	}{
		{body, signature, secret, true},
		{body + "\n", signature, secret, false},
		{body, signature, "another", false},
		{body, "", secret, false},
		{body, signature[:39], secret, false},
		{body, signature + "0", secret, false},
		{body, "0" + signature[1:39] + "\xe9", secret, false},
		{body, strings.Repeat("\xe9", 40), secret, false},
		{body, strings.Repeat("\xe9", 20), secret, false},
	} {
		fmt.Fprintf(&lines, "%s %s %s\n", hex.EncodeToString([]byte(c.body)), hex.EncodeToString([]byte(c.signature)),
			hex.EncodeToString([]byte(c.secret)))
		fmt.Fprintln(&want, c.authentic)
	}
	runReceivers(t, receivers, "authentic", lines.String(), want.String())
}

// batchReceivers has programs for the snippets about batches in docs/receiving.md. Each reads lines of a content type, a key and
// a body, all in hex, and prints the types of the new messages of each.
var batchReceivers = []receiver{
	{"js", "batch.js", []string{"node"}, `SNIPPET
const seen = new Set()
for (const line of require('node:fs').readFileSync(0, 'utf8').trim().split('\n')) {
  const [type, key, body] = line.split(' ').map((hex) => Buffer.from(hex, 'hex'))
  const list = newMessages(body, {'content-type': type.toString(), 'idempotency-key': key.toString()}, seen)
  console.log(list.map((m) => m.type).join(' '))
}`},
	{"python", "batch.py", []string{"python3"}, `SNIPPET
import sys
seen = set()
for line in sys.stdin:
    type, key, body = (bytes.fromhex(h) for h in line.rstrip("\n").split(" "))
    found = new_messages(body, {"Content-Type": type.decode(), "Idempotency-Key": key.decode()}, seen)
    print(" ".join(m["type"] for m in found))`},
	{"go", "batch.go", []string{"go", "run"}, `package main

import ("bufio"; "encoding/hex"; "encoding/json"; "errors"; "fmt"; "io"; "net/http"; "os"; "strings")

SNIPPET
func main() {
	seen := map[string]bool{}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var parts [3]string
		for i, h := range strings.Split(lines.Text(), " ") {
			b, _ := hex.DecodeString(h)
			parts[i] = string(b)
		}
		list, err := newMessages(strings.NewReader(parts[2]), http.Header{"Content-Type": {parts[0]}, "Idempotency-Key": {parts[1]}}, seen)
		if err != nil {
			panic(err)
		}
		var types []string
		for _, text := range list {
			var m struct{ Type string }
			json.Unmarshal(text, &m)
			types = append(types, m.Type)
		}
		fmt.Println(strings.Join(types, " "))
	}
}`},
}

// The snippets about batches return each message once, whatever batches it is in.
func TestBatchReceivers(t *testing.T) {
	var lines, want strings.Builder
	for _, c := range []struct{ contentType, key, body, types string }{
		{"application/json", "k1", `[{"messageId":"1","type":"a"},{"messageId":"2","type":"b","text":"]}\u2028"}]`, "a b"},
		{"application/x-ndjson", "k2", `{"messageId":"2","type":"b"}` + "\n" + `{"messageId":"3","type":"c","text":"` + "\u2028" + `"}` + "\n", "c"},
		{"application/x-ndjson", "k3", `{"type":"delete","userId":"u"}` + "\n", "delete"},
		{"application/json", "k4", `[{"type":"delete","userId":"v"}]`, "delete"},
		{"application/json", "k4", `[{"type":"delete","userId":"v"}]`, ""},
		{"application/json", "k5", `[{"messageId":"1","type":"a"},{"messageId":"4","type":"d"}]`, "d"},
	} {
		fmt.Fprintf(&lines, "%x %x %x\n", c.contentType, c.key, c.body)
		fmt.Fprintln(&want, c.types)
	}
	runReceivers(t, batchReceivers, "newMessages|new_messages", lines.String(), want.String())
}

// runReceivers runs the snippets of docs/receiving.md that have a function, and compares what they print for an input. The page has
// one in each language of the receivers, and in no other.
func runReceivers(t *testing.T, receivers []receiver, function, input, want string) {
	t.Helper()
	page, err := Blocks(root, filepath.Join("docs", "receiving.md"))
	if err != nil {
		t.Fatal(err)
	}
	snippets := map[string]string{}
	for _, b := range page {
		if regexp.MustCompile(function).MatchString(b.Text) {
			snippets[b.Language] = b.Text
		}
	}
	if len(snippets) != len(receivers) {
		t.Errorf("languages of the snippets: got %d, want %d", len(snippets), len(receivers))
	}
	for _, r := range receivers {
		t.Run(r.language, func(t *testing.T) {
			if snippets[r.language] == "" {
				t.Fatal("the page has no snippet in this language")
			}
			if _, err := exec.LookPath(r.command[0]); err != nil {
				t.Skip(err)
			}
			file := filepath.Join(t.TempDir(), r.file)
			if err := os.WriteFile(file, []byte(strings.Replace(r.program, "SNIPPET", snippets[r.language], 1)), 0o600); err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), r.command[0], append(r.command[1:], file)...)
			cmd.Stdin = strings.NewReader(input)
			if got, err := cmd.CombinedOutput(); err != nil || string(got) != want {
				t.Errorf("results: got error %v and\n%s\nwant\n%s", err, got, want)
			}
		})
	}
}
