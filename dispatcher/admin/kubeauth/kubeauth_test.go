package kubeauth

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/wait"
)

const namespace = "posthorn-system"

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

var secretPage = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "secret page") })

// TestOnARealAPIServer asks a real API server, with the rights that config/
// gives a dispatcher, about tokens that it really issued.
func TestOnARealAPIServer(t *testing.T) {
	server, kubectl := env.For(t)
	if err := server.Install(); err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	boss, err := kubernetes.NewForConfig(server.Config)
	if err != nil {
		t.Fatal(err)
	}
	own, err := kubernetes.NewForConfig(server.As("posthorn-dispatcher"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"prometheus", "stranger"} {
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if _, err := boss.CoreV1().ServiceAccounts("default").Create(ctx, account, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "prometheus-reads-posthorn"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "posthorn-metrics-reader"},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "default", Name: "prometheus"}},
	}
	if _, err := boss.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	token := func(ns, account string, audience ...string) string {
		t.Helper()
		made, err := boss.CoreV1().ServiceAccounts(ns).CreateToken(ctx, account,
			&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: audience}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return made.Status.Token
	}
	tampered := func(token string) string { return token[:len(token)-6] + "AAAAAA" }

	var caller adminapi.Caller
	handler := New(own, quiet()).Wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		caller = adminapi.CallerOf(r.Context())
		secretPage(w, r)
	}))
	for _, c := range []struct {
		name, authorization, method, path string
		want                              int
	}{
		{"no token", "", "GET", "/report", 401},
		{"another scheme", "Basic cG9zdDpob3Ju", "GET", "/report", 401},
		{"an empty token", "Bearer ", "GET", "/report", 401},
		{"no token at all", "Bearer nonsense", "GET", "/report", 401},
		{"a token too long", "Bearer " + strings.Repeat("a", maxTokenBytes+1), "GET", "/report", 401},
		{"the operator", "Bearer " + token(namespace, "posthorn-operator", adminapi.TokenAudience), "GET", "/report", 200},
		{"the operator, scheme in lower case", "bearer " + token(namespace, "posthorn-operator", adminapi.TokenAudience), "GET", "/report", 200},
		{"the operator, tampered", "Bearer " + tampered(token(namespace, "posthorn-operator", adminapi.TokenAudience)), "GET", "/report", 401},
		{"a token for somebody else", "Bearer " + token(namespace, "posthorn-operator", "vault"), "GET", "/report", 401},
		{"the operator needs no purge", "Bearer " + token(namespace, "posthorn-operator", adminapi.TokenAudience), "POST",
			"/deadletters/purge", 403},
		{"monitoring with its own token", "Bearer " + token("default", "prometheus"), "GET", "/metrics", 200},
		{"monitoring reads nothing else", "Bearer " + token("default", "prometheus"), "GET", "/deadletters", 403},
		{"a stranger", "Bearer " + token("default", "stranger"), "GET", "/metrics", 403},
		{"support lists", "Bearer " + token(namespace, "posthorn-support", adminapi.TokenAudience), "GET", "/deadletters", 200},
		{"support shows", "Bearer " + token(namespace, "posthorn-support", adminapi.TokenAudience), "GET", "/deadletters/018c", 200},
		{"support purges", "Bearer " + token(namespace, "posthorn-support", adminapi.TokenAudience), "POST", "/deadletters/purge", 200},
		{"support follows", "Bearer " + token(namespace, "posthorn-support", adminapi.TokenAudience), "GET", "/tail", 200},
		{"support looks inside", "Bearer " + token(namespace, "posthorn-support", adminapi.TokenAudience), "GET", "/debug/pprof/heap", 200},
		{"support reads no body", "Bearer " + token(namespace, "posthorn-support", adminapi.TokenAudience), "GET",
			"/bodies/deadletters/018c", 403},
		{"support follows no bodies", "Bearer " + token(namespace, "posthorn-support", adminapi.TokenAudience), "GET", "/bodies/tail", 403},
		{"the account of bodies reads one", "Bearer " + token(namespace, "posthorn-bodies", adminapi.TokenAudience), "GET",
			"/bodies/deadletters/018c", 200},
		{"the account of bodies follows", "Bearer " + token(namespace, "posthorn-bodies", adminapi.TokenAudience), "GET", "/bodies/tail", 200},
		{"the account of bodies purges nothing", "Bearer " + token(namespace, "posthorn-bodies", adminapi.TokenAudience), "POST",
			"/deadletters/purge", 403},
		{"support makes no backup", "Bearer " + token(namespace, "posthorn-support", adminapi.TokenAudience), "POST", adminapi.BackupPath, 403},
		{"support and no more", "Bearer " + token(namespace, "posthorn-support", adminapi.TokenAudience), "GET", "/other", 403},
	} {
		t.Run(c.name, func(t *testing.T) {
			for range 2 { // the second time from memory
				request := httptest.NewRequest(c.method, c.path, nil)
				if c.authorization != "" {
					request.Header.Set("Authorization", c.authorization)
				}
				answer := httptest.NewRecorder()
				handler.ServeHTTP(answer, request)
				if answer.Code != c.want {
					t.Errorf("answered %d, want %d: %s", answer.Code, c.want, answer.Body)
				}
				advice := "bind the ClusterRole posthorn-support"
				switch {
				case c.path == adminapi.BackupPath:
					advice = "no ClusterRole of the chart includes it"
				case strings.HasPrefix(c.path, adminapi.BodiesPath):
					advice = "bind the ClusterRole posthorn-bodies"
				}
				if advised := strings.Contains(answer.Body.String(), advice); advised != (c.want == 403) {
					t.Errorf("the answer advises %q: %v: %s", advice, advised, answer.Body)
				}
				if c.want == 200 && (!strings.HasPrefix(caller.User, "system:serviceaccount:") || !strings.HasPrefix(caller.CredentialID, "JTI=")) {
					t.Errorf("caller: got %+v, want a ServiceAccount and the id of its token", caller)
				}
				if leaked := strings.Contains(answer.Body.String(), "secret page"); leaked != (c.want == 200) {
					t.Errorf("the page was served: %v", leaked)
				}
			}
		})
	}

	t.Run("support does not look inside the API server", func(t *testing.T) {
		config := rest.AnonymousClientConfig(server.Config)
		config.BearerToken = token(namespace, "posthorn-support")
		support, err := kubernetes.NewForConfig(config)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := support.Discovery().RESTClient().Get().AbsPath("/debug/pprof/").DoRaw(ctx); !apierrors.IsForbidden(err) {
			t.Errorf("its own profiles: %v; want to be forbidden", err)
		}
	})

	t.Run("certificate", func(t *testing.T) {
		watching, cancel := context.WithCancel(ctx)
		var certificate Certificate
		done := make(chan error, 1)
		go func() { done <- certificate.Watch(watching, own, namespace, quiet()) }()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		if _, err := certificate.Config().GetCertificate(nil); err == nil || !strings.Contains(err.Error(), adminapi.CertificateSecret) {
			t.Errorf("without a Secret: %v; want an error that names it", err)
		}
		put := func(cert, key string) {
			t.Helper()
			kubectl(fmt.Sprintf("apiVersion: v1\nkind: Secret\nmetadata: {name: %s, namespace: %s}\nstringData: {tls.crt: %q, tls.key: %q}\n", adminapi.CertificateSecret, namespace, cert, key), "apply", "--server-side", "-f", "-")
		}
		cert1, key1 := selfSigned(t)
		put(cert1, key1)
		presents := func(cert, key string) {
			t.Helper()
			want, err := tls.X509KeyPair([]byte(cert), []byte(key))
			if err != nil {
				t.Fatal(err)
			}
			for deadline := time.Now().Add(wait.Limit); ; time.Sleep(20 * time.Millisecond) {
				got, err := certificate.Config().GetCertificate(nil)
				if err == nil && string(got.Certificate[0]) == string(want.Certificate[0]) {
					return
				}
				if time.Now().After(deadline) {
					t.Fatalf("the certificate did not come: %v", err)
				}
			}
		}
		presents(cert1, key1)
		put("nonsense", key1)
		cert2, key2 := selfSigned(t)
		presents(cert1, key1)
		put(cert2, key2)
		presents(cert2, key2)
		if err := boss.CoreV1().Secrets(namespace).Delete(ctx, adminapi.CertificateSecret, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		presents(cert2, key2)
	})
}

type clock struct{ now time.Time }

func (c *clock) Now() time.Time { return c.now }

// TestMemory counts what is asked of the API server.
func TestMemory(t *testing.T) {
	client := fake.NewClientset()
	var reviews, accesses int
	var broken error
	allowed := true
	client.PrependReactor("create", "tokenreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		reviews++
		review := a.(clienttesting.CreateAction).GetObject().(*authenticationv1.TokenReview).DeepCopy()
		review.Status = authenticationv1.TokenReviewStatus{Authenticated: true, User: authenticationv1.UserInfo{Username: "ann"}}
		return true, review, broken
	})
	client.PrependReactor("create", "subjectaccessreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		accesses++
		review := a.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview).DeepCopy()
		review.Status.Allowed = allowed
		return true, review, nil
	})
	now := &clock{time.Unix(1_700_000_000, 0)}
	handler := newGuard(client, quiet(), now).Wrap(secretPage)
	get := func(token, path string) int {
		request := httptest.NewRequest(http.MethodGet, path, nil)
		request.Header.Set("Authorization", "Bearer "+token)
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, request)
		return answer.Code
	}
	expect := func(what string, got, status, wantReviews, wantAccesses int) {
		t.Helper()
		if got != status || reviews != wantReviews || accesses != wantAccesses {
			t.Errorf("%s: %d after %d and %d reviews, want %d after %d and %d", what, got, reviews, accesses, status, wantReviews, wantAccesses)
		}
	}
	expect("first", get("a", "/report"), 200, 1, 1)
	expect("again", get("a", "/report"), 200, 1, 1)
	expect("another path", get("a", "/tail"), 200, 2, 2)
	expect("another token", get("b", "/report"), 200, 3, 3)
	now.now = now.now.Add(allowTTL - time.Second)
	expect("within the minute", get("a", "/report"), 200, 3, 3)
	now.now = now.now.Add(2 * time.Second)
	allowed = false
	expect("after it, when the permission is removed", get("a", "/report"), 403, 4, 4)
	expect("the no is remembered", get("a", "/report"), 403, 4, 4)
	allowed = true
	now.now = now.now.Add(denyTTL + time.Second)
	expect("for a shorter time", get("a", "/report"), 200, 5, 5)

	broken = errors.New("down")
	expect("a cached caller is admitted while the API server is down", get("a", "/report"), 200, 5, 5)
	expect("others have to wait", get("c", "/report"), 503, 6, 5)
	expect("which is not remembered", get("c", "/report"), 503, 7, 5)
	broken = nil
	expect("and ends at once", get("c", "/report"), 200, 8, 6)

	// A token that claims Posthorn's audience, and an API server without support for audiences.
	claims := "e30.eyJhdWQiOlsicG9zdGhvcm4uZGV2L2Rpc3BhdGNoZXIiXX0.x"
	expect("an unconfirmed audience", get(claims, "/report"), 401, 9, 6)
}

// Callers with invented tokens must not delay callers that were admitted before.
func TestAFloodOfTokensHarmsNobodyKnown(t *testing.T) {
	client := fake.NewClientset()
	client.PrependReactor("create", "tokenreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		review := a.(clienttesting.CreateAction).GetObject().(*authenticationv1.TokenReview).DeepCopy()
		review.Status.Authenticated = review.Spec.Token == "operator"
		return true, review, nil
	})
	client.PrependReactor("create", "subjectaccessreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		review := a.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview).DeepCopy()
		review.Status.Allowed = true
		return true, review, nil
	})
	now := &clock{time.Unix(1_700_000_000, 0)}
	guard := newGuard(client, quiet(), now)
	get := func(token string) int {
		request := httptest.NewRequest(http.MethodGet, "/report", nil)
		request.Header.Set("Authorization", "Bearer "+token)
		answer := httptest.NewRecorder()
		guard.Wrap(secretPage).ServeHTTP(answer, request)
		return answer.Code
	}
	if code := get("operator"); code != http.StatusOK {
		t.Fatal(code)
	}
	guard.limit.SetLimit(0) // The rate limit for unknown callers is used up.
	for guard.limit.Allow() {
		continue
	}
	if code := get("stranger"); code != http.StatusServiceUnavailable {
		t.Errorf("a stranger got %d beyond the limit, want 503", code)
	}
	for range 3 {
		now.now = now.now.Add(allowTTL + time.Second)
		if code := get("operator"); code != http.StatusOK {
			t.Errorf("a caller admitted a minute ago got %d, want 200", code)
		}
	}
	now.now = now.now.Add(knownTTL + time.Second)
	if code := get("operator"); code != http.StatusServiceUnavailable {
		t.Errorf("a caller admitted long ago got %d, want 503", code)
	}
}

func TestAudiences(t *testing.T) {
	for token, ours := range map[string]bool{
		"":    false,
		"a.b": false, "a.%.c": false, "a.bm8.c": false,
		"e30.e30.x":             false,
		"e30.eyJhdWQiOiJ4In0.x": false,
		"e30.eyJhdWQiOlsieCIsInBvc3Rob3JuLmRldi9kaXNwYXRjaGVyIl19.x": true,
		"e30.eyJhdWQiOiJwb3N0aG9ybi5kZXYvZGlzcGF0Y2hlciJ9.x":         true,
		"e30.eyJhdWQiOjF9.x": false,
	} {
		if got := audiences(token) != nil; got != ours {
			t.Errorf("audiences(%q): ours is %v, want %v", token, got, ours)
		}
	}
}
