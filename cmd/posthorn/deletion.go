package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/standalone"
)

func newDeleteUser() *cobra.Command {
	var manifests, namespace, name, admin string
	var sources []string
	var suppress, wait bool
	var timeout, ttl time.Duration
	cmd := &cobra.Command{
		Use:   "delete-user USERID --manifests DIR",
		Short: "Tell the webhooks that a user's data is to be deleted (of posthorn run)",
		Long: `Writes a DeletionRequest into the folder of manifests of a Posthorn that runs
without a cluster. Each affected Source's enabled destinations get one delete
message. In a cluster, apply a DeletionRequest instead.

With --wait it prints the outcome of each notification when all are final, and
exits 1 when one was not delivered. To ask again for the same user later, remove
the file, or set another --name; with --ttl it is removed by itself.`,
		Example: `  posthorn delete-user u1 --manifests ./webhooks --wait
  posthorn delete-user u1 --manifests ./webhooks --source web --suppress`,
		Args: exactArgs("USERID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if manifests == "" {
				return usagef("--manifests is missing: the folder of manifests of the running Posthorn")
			}
			if info, err := os.Stat(manifests); err != nil || !info.IsDir() {
				return usagef("--manifests %q is not a folder", manifests)
			}
			if args[0] == "" {
				return usagef("USERID is empty")
			}
			if cmd.Flags().Changed("ttl") && (ttl%time.Second != 0 || ttl < 10*time.Second || ttl > 365*24*time.Hour) {
				return usagef("--ttl must be whole seconds, from 10s to a year")
			}
			if suppress && ttl > 0 {
				return usagef("--ttl has no effect with --suppress: who is suppressed stays so until the file is removed")
			}
			spec := v1alpha1.DeletionRequestSpec{UserID: args[0], Sources: sources, Suppress: suppress}
			if ttl > 0 {
				spec.TTLSecondsAfterFinished = ptr.To(int32(ttl / time.Second))
			}
			if name == "" {
				sum := sha256.Sum256([]byte(args[0]))
				name = "delete-" + hex.EncodeToString(sum[:6])
			}
			text, err := yaml.Marshal(map[string]any{
				"apiVersion": v1alpha1.GroupVersion.String(), "kind": "DeletionRequest",
				"metadata": map[string]string{"name": name, "namespace": namespace},
				"spec":     spec,
			})
			if err != nil {
				return err
			}
			path := filepath.Join(manifests, "deletionrequest-"+namespace+"-"+name+".yaml")
			if err := writeNew(path, text); errors.Is(err, os.ErrExist) {
				return fmt.Errorf("%s exists: this user's deletion was requested before; see 'posthorn get deletions %s', or remove the file to ask again", path, name)
			} else if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "requested: %s\n", path)
			if !wait {
				return nil
			}
			return awaitDeletion(cmd, admin, namespace, name, timeout)
		},
	}
	f := cmd.Flags()
	f.StringVar(&manifests, "manifests", "", "the folder of manifests of the running Posthorn")
	f.StringVarP(&namespace, "namespace", "n", "default", "namespace of the request")
	f.StringVar(&name, "name", "", "name of the request (default: made of the user's id)")
	f.StringSliceVar(&sources, "source", nil, "an affected Source; may be repeated (default: all of the namespace)")
	f.BoolVar(&suppress, "suppress", false, "refuse later calls of this user, as long as the request exists")
	f.DurationVar(&ttl, "ttl", 0, "remove the request so long after it is finished (default: it stays)")
	f.BoolVar(&wait, "wait", false, "wait until every notification has its final state")
	f.DurationVar(&timeout, "timeout", 5*time.Minute, "how long to wait")
	adminFlag(cmd, &admin)
	return cmd
}

// writeNew writes a file as a whole, unless there is one of that name.
func writeNew(path string, text []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".deletionrequest-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(text)
	if err := errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Link(tmp.Name(), path)
}

// awaitDeletion waits for the end of a request and prints it.
func awaitDeletion(cmd *cobra.Command, admin, namespace, name string, timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	path := standalone.Prefix + "/namespaces/" + url.PathEscape(namespace) + "/deletionrequests/" + url.PathEscape(name)
	for {
		var last error
		body, err := ask(cmd, admin, path, "application/json")
		if err == nil {
			var d v1alpha1.DeletionRequest
			if err := json.Unmarshal(body, &d); err != nil {
				return err
			}
			accepted := meta.FindStatusCondition(d.Status.Conditions, v1alpha1.ConditionAccepted)
			if accepted != nil && accepted.Status == metav1.ConditionFalse {
				return fmt.Errorf("not accepted: %s", accepted.Message)
			}
			finished := meta.FindStatusCondition(d.Status.Conditions, v1alpha1.ConditionFinished)
			if finished != nil && finished.Status == metav1.ConditionTrue {
				for _, n := range d.Status.Notifications {
					fmt.Fprintln(cmd.OutOrStdout(), strings.TrimSpace(fmt.Sprintf("%s to %s: %s %s", n.Source, n.Destination, n.State, n.Reason)))
				}
				fmt.Fprintln(cmd.OutOrStdout(), finished.Message)
				if finished.Reason == v1alpha1.ReasonNotDelivered {
					return errSilent
				}
				return nil
			}
			last = errors.New("no status yet")
			if finished != nil {
				last = errors.New(finished.Message)
			}
		} else {
			last = err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not finished after %s: %w", timeout, last)
		}
		select {
		case <-cmd.Context().Done():
			return cmd.Context().Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}
