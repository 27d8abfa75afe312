/** The data that stands in the page. */
export function embedded<T>(schema: number): T {
  const data = JSON.parse(document.getElementById("data")!.textContent!) as T & { schema: number };
  if (data.schema !== schema) throw new Error(`the data of this page has schema ${data.schema}, and its program reads ${schema}`);
  return data;
}
