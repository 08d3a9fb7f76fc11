// Calls a server with Java's HttpClient, which offers HTTP/2: `java JavaClient.java BASE_URL KEY
// CALL LATE`. Prints the answer to the first body, and the lines of the second.

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.stream.Stream;

class JavaClient {
    public static void main(String[] words) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int place = 2; place < words.length; place++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(words[0] + "/chat/completions"))
                .header("authorization", "Bearer " + words[1])
                .header("content-type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(words[place]))
                .build();
            HttpResponse<Stream<String>> answer =
                client.send(request, HttpResponse.BodyHandlers.ofLines());
            answer.body().forEach(System.out::println);
        }
    }
}
